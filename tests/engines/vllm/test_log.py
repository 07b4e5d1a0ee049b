import time

from kvtune.engines.vllm.log import LogTail, plain


def test_every_line_arrives_in_order_the_unfinished_last_one_too(tmp_path, wait_for):
    path = tmp_path / "log"
    path.write_text("first\nsec")
    lines = []
    tail = LogTail(path, lines.append)
    wait_for(lambda: lines == ["first"])
    with path.open("a") as file:
        file.write("ond\nthird")
        file.flush()
        wait_for(lambda: lines == ["first", "second"])
    tail.stop()
    assert lines == ["first", "second", "third"]
    assert tail.last_line == "third"


def test_silence_is_measured_from_the_last_line(tmp_path, wait_for):
    path = tmp_path / "log"
    path.write_text("one\n")
    lines = []
    tail = LogTail(path, lines.append)
    wait_for(lambda: lines == ["one"])
    seen_s = tail.last_line_s
    time.sleep(0.25)
    assert tail.last_line_s == seen_s
    tail.stop()


def test_escapes_and_overwritten_text_are_removed():
    assert plain("\x1b[32mok\x1b[0m\n10%\r20%\rdone\n") == "ok\ndone\n"
