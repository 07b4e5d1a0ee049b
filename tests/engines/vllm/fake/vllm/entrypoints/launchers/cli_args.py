"""Part of the stand-in."""

import json
from argparse import BooleanOptionalAction


def make_arg_parser(parser):
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--enable-prefix-caching", action=BooleanOptionalAction, default=True)
    parser.add_argument("--attention-config", type=json.loads)
    parser.add_argument("--additional-config", type=json.loads)
    parser.add_argument("--fake-fault", default="")
    parser.add_argument("--fake-print", default="")
    parser.add_argument("--fake-pids")
    parser.add_argument("--fake-ignore-max-num-seqs", action="store_true")
    return parser
