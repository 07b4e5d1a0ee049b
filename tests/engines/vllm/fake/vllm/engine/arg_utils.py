"""Part of the stand-in."""


class AsyncEngineArgs:
    @classmethod
    def from_cli_args(cls, args):
        if args.block_size == 7:
            raise ValueError("block_size must be a multiple of 8")
        return cls()
