"""The empty stack, the full cache, is held to the same properties as every method."""

from contracts.method import MethodContract


class TestFullCache(MethodContract):
    samples = ("full",)
    exact = "full"
    stores_each_token_alone = True
