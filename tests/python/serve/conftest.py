"""A server with the bundled model, which is given a chat template, as clients see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sharpi.files.metadata import Metadata
from sharpi.loading.loaded_model import LoadedModel
from sharpi.scheduler import Scheduler
from sharpi.serve.server import Runner
from sharpi.serve.settings import ServerSettings

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def with_template(model: LoadedModel, scheduler: Scheduler, settings: ServerSettings) -> Runner:
    """The usual runner of a model that has a chat template now."""
    from sharpi.serve.models.loading import default_runner

    model.file = replace(model.file, metadata=Metadata(
        model.file.paths[0], {**model.file.metadata, "tokenizer.chat_template": TEMPLATE}))
    return default_runner(model, scheduler, settings)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server in a thread of this process; its model is called "story"."""
    import uvicorn

    from sharpi.serve.app import create_app
    from sharpi.serve.http.process import listen
    from sharpi.serve.http.protocol import BoundedProtocol

    failures: list[str] = []
    app = create_app(ServerSettings(device="cpu", threads=1, context=512, cache_tokens=2048, port=0),
                     make_runner=with_template, failed=failures.append)
    with listen("127.0.0.1", 0) as listening:
        config = uvicorn.Config(app, http=BoundedProtocol, log_level="error", timeout_graceful_shutdown=3)
        process = uvicorn.Server(config)
        thread = threading.Thread(target=process.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            store = app.state.server.store
            while not (process.started and store.loaded()):
                assert thread.is_alive() and not failures, failures
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            process.should_exit = True
            thread.join()
