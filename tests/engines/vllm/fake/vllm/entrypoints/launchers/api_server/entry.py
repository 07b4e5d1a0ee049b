"""Part of the stand-in: a server with vLLM's addresses, and faults on request."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vllm.entrypoints.launchers.cli_args import make_arg_parser

STUBBORN = Path(__file__).parents[5] / "stubborn_tree.py"


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def config(args):
    seqs = 128 if args.fake_ignore_max_num_seqs else args.max_num_seqs
    return {
        "cache_config": {
            "block_size": args.block_size,
            "num_gpu_blocks": 91,
            "cache_dtype": "auto",
            "enable_prefix_caching": args.enable_prefix_caching,
        },
        "scheduler_config": {"max_num_seqs": seqs},
        "model_config": {"dtype": "torch.bfloat16", "max_model_len": 2048},
        "device_config": {"device": "cpu"},
    }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        fault = self.server.args.fake_fault
        if fault == "unhealthy":
            return self.answer({}, 503)
        if self.path == "/hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.path == "/exit":
            os._exit(3)
        if self.path == "/engine-dead":
            say("(APIServer pid=1) ERROR 11-29 17:16:06 [async_llm.py:54] EngineDeadError: x")
            return self.answer({}, 500)
        key = os.environ.get("VLLM_API_KEY")
        sent = self.headers.get("Authorization")
        if key and self.path.startswith("/v1") and sent != f"Bearer {key}":
            return self.answer({"error": "Unauthorized"}, 401)
        names = self.server.args.served_model_name or [self.server.args.model]
        return self.answer(
            {
                "/version": {"version": "0.32.7"},
                "/v1/models": {"data": [{"id": name} for name in names]},
                "/server_info?config_format=json": {"vllm_config": config(self.server.args)},
                "/environment": dict(os.environ),
                "/self": {"pid": os.getpid(), "argv": sys.argv, "sid": os.getsid(0)},
            }.get(self.path, {})
        )

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


def main():
    parser = make_arg_parser(argparse.ArgumentParser(prog="entry.py"))
    args = parser.parse_args()
    if args.fake_print:
        say(args.fake_print)
    if args.fake_fault == "crash":
        sys.exit("RuntimeError: the device is on fire")
    if args.fake_fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.fake_fault == "silent":
        time.sleep(60)
    if args.fake_fault == "slow":
        for step in range(600):
            say(f"loading {step}")
            time.sleep(0.1)
    if args.fake_pids:
        subprocess.Popen([sys.executable, str(STUBBORN), args.fake_pids])
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.args = args
    # As in vLLM: end in an orderly way on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
