"""Whatever stops a download, the user reads one sentence."""

import importlib

import huggingface_hub
import huggingface_hub.errors
import pytest

from k3tune.errors import CheckpointError
from k3tune.published.hub import resolve_checkpoint

# httpx under the name of the fork that the installed hub client is built on
httpx = importlib.import_module(
    huggingface_hub.errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0]
)


@pytest.mark.parametrize(
    "error",
    [
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
        httpx.TooManyRedirects("Exceeded maximum allowed redirects."),
        httpx.ConnectTimeout(""),
        httpx.InvalidURL("Invalid port"),
        OSError("disk full"),
        ValueError(""),
        huggingface_hub.errors.LocalEntryNotFoundError("not cached\nand a second line"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_of_a_download_names_repository_and_remedy(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint("example/Kimi-K3")
    message = str(caught.value)
    said = "".join(f": {line}" for line in str(error).splitlines()[:1])
    assert f"download failed ({type(error).__name__}{said}): pass a local folder" in message
    assert message.startswith("example/Kimi-K3: expected a folder or a hub repository")
    assert message.isprintable()


def test_a_name_too_long_for_a_folder_is_a_sentence():
    with pytest.raises(CheckpointError, match=r"aaa\.\.\.: cannot be read \(File name too long\)"):
        resolve_checkpoint("a" * 5000)
