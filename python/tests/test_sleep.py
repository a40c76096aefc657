"""Memory that sleeps."""

import errno
import os
import pickle
import threading

import pytest

import vpmm

MIB = 1 << 20


@pytest.mark.parametrize("contents", ["keep", "keep buffers", "file"])
def test_contents_come_back(contents, tmp_path):
    with vpmm.tag("weights"):
        buffer = vpmm.DeviceBuffer.from_bytes(bytes(range(256)) * 8192)
    other = vpmm.DeviceBuffer(MIB)
    held = vpmm.statistics().mapped_bytes
    how = {"path": tmp_path / "saved"} if contents == "file" else {"contents": contents}
    asleep = vpmm.suspend("weights", **how)
    assert asleep >= 2 * MIB and vpmm.statistics().mapped_bytes == held - asleep
    segments = {segment["heap"]: segment for segment in vpmm.snapshot()["segments"]}
    assert segments["tag weights"]["is_asleep"] and not segments["main"]["is_asleep"]
    with pytest.raises(vpmm.StateError), vpmm.tag("weights"):
        vpmm.DeviceBuffer(1)
    with pytest.raises(vpmm.StateError):
        vpmm.suspend("weights")
    pointer = buffer.ptr
    assert vpmm.resume("weights") == asleep and buffer.ptr == pointer
    assert buffer.to_bytes() == bytes(range(256)) * 8192
    with pytest.raises(vpmm.StateError):
        vpmm.resume("weights")
    other.free()
    buffer.free()


def test_an_error_of_a_file_s_has_the_system_s_number_and_the_name(tmp_path):
    with vpmm.tag("lost"):
        buffer = vpmm.DeviceBuffer(MIB)
    nowhere, saved = str(tmp_path / "no: folder" / "saved"), str(tmp_path / "saved (os error 5)")
    with pytest.raises(vpmm.InputOutputError) as refused:
        vpmm.suspend("lost", path=nowhere)
    vpmm.suspend("lost", path=saved)
    os.rename(saved, f"{saved}.away")
    with pytest.raises(vpmm.InputOutputError) as missing:
        vpmm.resume("lost")
    for error, name in ((refused.value, nowhere), (missing.value, saved)):
        for seen in (error, pickle.loads(pickle.dumps(error))):
            why = (seen.errno, seen.strerror, seen.filename, seen.status)
            assert why == (errno.ENOENT, os.strerror(errno.ENOENT), name, "VPMM_IO_ERROR")
            assert str(seen).startswith("the file with a heap's contents failed: ")
    os.rename(f"{saved}.away", saved)
    os.truncate(saved, 1)
    with pytest.raises(vpmm.InputOutputError, match="not as long") as changed:
        vpmm.resume("lost")
    assert (changed.value.errno, changed.value.filename) == (None, None)
    vpmm.resume("lost", empty=True)
    buffer.free()


def test_contents_can_be_given_up():
    with vpmm.tag("cache"):
        buffer = vpmm.DeviceBuffer(MIB)
    assert vpmm.suspend("cache", contents="discard") == vpmm.resume("cache") >= MIB
    assert vpmm.suspend("cache") == vpmm.resume("cache", empty=True) >= MIB
    buffer.free()


def test_a_tag_is_its_thread_s_and_its_block_s():
    buffers = {}

    def allocate(name):
        buffers[name] = vpmm.DeviceBuffer(1000)

    def heap_of(name):
        for segment in vpmm.snapshot()["segments"]:
            if any(block["address"] == buffers[name].ptr for block in segment["blocks"]):
                return segment["heap"]

    with vpmm.tag("outer"):
        allocate("before")
        with vpmm.tag("inner"):
            allocate("inside")
            thread = threading.Thread(target=allocate, args=("thread",))
            thread.start()
            thread.join()
        with pytest.raises(KeyError), vpmm.tag("inner"):
            raise KeyError
        allocate("after")
    allocate("outside")
    heaps = {name: heap_of(name) for name in buffers}
    assert heaps == {
        "before": "tag outer",
        "inside": "tag inner",
        "thread": "main",
        "after": "tag outer",
        "outside": "main",
    }


def test_mistakes():
    with pytest.raises(ValueError, match="contents"):
        vpmm.suspend("weights", contents="sell")
    with pytest.raises(vpmm.NotFoundError):
        vpmm.suspend("nobody has this tag")
    with pytest.raises(vpmm.NotFoundError):
        vpmm.resume("nobody has this tag")


def test_a_name_with_a_zero_is_no_shorter_one(tmp_path):
    # The library takes a text to end there: it would be another tag, and another file.
    with pytest.raises(ValueError, match="zero"), vpmm.tag("zero\0of another"):
        pass
    pool = vpmm.Pool.of_process()
    with pytest.raises(ValueError, match="zero"):
        pool.malloc(1, tag="zero\0of another")
    with vpmm.tag("zero"):
        buffer = vpmm.DeviceBuffer(MIB)
    with pytest.raises(ValueError, match="zero"):
        vpmm.suspend("zero\0of another")
    with pytest.raises(ValueError, match="zero"):
        vpmm.suspend("zero", path=f"{tmp_path}/file\0of another")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="zero"):
        vpmm.mr.open("default\0 of another")
    buffer.free()
