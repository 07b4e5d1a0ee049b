"""Part of the stand-in."""


class _Platform:
    @classmethod
    def check_and_update_config(cls, config):
        pass


current_platform = _Platform()
