"""Which functions of `remask` a plain chat request enters on its way in and out, on all threads of a server.

    python -m tests.server.entered

prints them, file by file.
"""

from types import CodeType

from remask.engine.config import EngineConfig
from remask.llm import LLM
from tests.engine.entered import entered, report
from tests.server.serving import serving


def plain_request() -> dict[CodeType, int]:
    """Calls of each function while the second of two chats is answered, under the bundled model's own cache policy."""
    with entered(threads=True) as calls:
        engine = EngineConfig(attention="torch", overlap=False, graphs=False, audit=0)
        llm = LLM("bundled-transit", device="cpu", dtype="float32", threads=1, engine=engine)
        with serving(llm) as running:
            for number in range(2):
                running.settle()
                calls.clear()
                assert running.ask(number).status_code == 200
            return dict(calls)


if __name__ == "__main__":
    print(report(plain_request()))
