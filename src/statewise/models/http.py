"""JSON over HTTP to a server that may be slow, busy or dead: time limits, retries, a number of requests at once."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from random import Random
from typing import Any
from urllib.parse import urlsplit

from statewise.errors import EndpointError, RecipeError

FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0  # seconds between tries: doubled from the first to the longest
LONGEST_ASKED = 600.0  # seconds of Retry-After that are waited for
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # what may be better next time
SAY_EVERY = 10.0  # seconds between two words about the same trouble
SHOWN = 300  # characters of a server's own message


class Refused(EndpointError):
    """The server understood and said no; `status` is its HTTP status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class _Again(Exception):
    """Try again, after `seconds` where the server named them."""

    def __init__(self, problem: str, seconds: float | None = None):
        super().__init__(problem)
        self.seconds = seconds


class Client:
    """Requests to the server at `url`.

    key: sent as a bearer token, and shown nowhere. concurrency: requests at once in `map`.
    connect_seconds: to connect; timeout_seconds: from then to the whole answer.
    retries: tries after the first, with delays that double up to a minute, or what Retry-After asks for; then the
    server counts as dead. say(text): told of waiting and of recovery.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        concurrency: int = 16,
        connect_seconds: float = 10.0,
        timeout_seconds: float = 300.0,
        retries: int = 8,
        say: Callable[[str], None] = print,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RecipeError(f"endpoint: received '{url}', expected an address such as http://host:8000/v1.")
        if parts.username or parts.password:
            raise RecipeError("endpoint: the address holds a user or password; name a variable in api_key_env instead.")
        self.url, self.say, self.concurrency, self.retries = url.rstrip("/"), say, concurrency, retries
        self.connect_seconds, self.timeout_seconds = connect_seconds, timeout_seconds
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path, self._key = parts.path.rstrip("/"), key
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._random = Random()  # of its own: jitter must not move anybody's stream
        self._troubled_since: float | None = None
        self._said = float("-inf")

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any], *, plain: bool = False) -> Any:
        """The answer's JSON, or text where `plain`; a path that begins with "//" is beside the address's last part:
        //tokenize of .../v1.

        Raises Refused at once where the server says no, EndpointError where all tries failed.
        """
        return self._call("POST", path, json.dumps(body).encode(), plain)

    def map(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`work(item)` for all items, `concurrency` at a time, in their order. The first error ends all of them."""
        if not items:
            return []
        self._stop.clear()
        pool = ThreadPoolExecutor(min(self.concurrency, len(items)), thread_name_prefix="endpoint")
        futures = [pool.submit(work, item) for item in items]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            self._abort()
            pool.shutdown(wait=True, cancel_futures=True)
            self._stop.clear()

    def _abort(self) -> None:
        """Wake up whoever waits for an answer or a delay."""
        self._stop.set()
        with self._lock:
            for held in self._sockets:
                try:
                    held.shutdown(socket.SHUT_RDWR)
                except OSError:  # closed by its owner meanwhile
                    continue

    def _call(self, method: str, path: str, body: bytes | None, plain: bool = False) -> Any:
        started = time.monotonic()
        problem = ""
        for attempt in range(self.retries + 1):
            try:
                answer = self._once(method, path, body, plain)
            except _Again as again:
                problem = str(again)
                if attempt < self.retries:
                    self._pause(problem, attempt, again.seconds)
            else:
                self._recovered()
                return answer
        seconds = time.monotonic() - started
        raise EndpointError(
            f"endpoint {self.url}: gave no answer in {self.retries + 1} tries over {seconds:.0f} s; the last: {problem}. "
            "See whether the server runs and its address is right; `retries` and `timeout_seconds` of the teacher say how "
            "long it is waited for."
        )

    def _pause(self, problem: str, attempt: int, asked: float | None) -> None:
        if asked is not None and asked > LONGEST_ASKED:
            raise EndpointError(f"endpoint {self.url}: asks to come back in {asked:.0f} s ({problem}).")
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2**attempt) * self._random.uniform(0.5, 1.0)
        delay = delay if asked is None else asked + self._random.uniform(0.0, 0.1)
        with self._lock:
            now = time.monotonic()
            self._troubled_since = self._troubled_since or now
            speak = now - self._said > SAY_EVERY
            self._said = now if speak else self._said
        if speak:
            left = self.retries - attempt
            self.say(f"endpoint {self.url}: {problem}; paused, next try in {delay:.1f} s ({left} left)")
        if self._stop.wait(delay):
            raise EndpointError(f"endpoint {self.url}: given up, since another request failed or the run stops.")

    def _recovered(self) -> None:
        with self._lock:
            since, self._troubled_since = self._troubled_since, None
            spoke = since is not None and self._said >= since
            self._said = float("-inf") if spoke else self._said
        if spoke and since is not None:
            self.say(f"endpoint {self.url}: answers again after {time.monotonic() - since:.1f} s")

    def _once(self, method: str, path: str, body: bytes | None, plain: bool) -> Any:
        """One try. Raises _Again where another may help."""
        connection = self._connection()
        held: socket.socket | None = None
        try:
            connection.connect()
            held = connection.sock
            with self._lock:
                self._sockets.add(held)
            deadline = time.monotonic() + self.timeout_seconds
            held.settimeout(self.timeout_seconds)
            where = self._path.rpartition("/")[0] + path[1:] if path.startswith("//") else self._path + path
            connection.request(method, where, body, self._headers())
            response = connection.getresponse()
            data = _read(response, held, deadline)
        except ssl.SSLCertVerificationError as error:
            raise EndpointError(f"endpoint {self.url}: its certificate is not valid: {error.verify_message}.") from None
        except TimeoutError:
            limit = self.connect_seconds if held is None else self.timeout_seconds
            verb = "connect" if held is None else "answer"
            raise _Again(f"did not {verb} within {limit:g} s") from None
        except (OSError, HTTPException) as error:
            raise _Again(_reason(error)) from None
        finally:
            with self._lock:
                if held is not None:
                    self._sockets.discard(held)
            connection.close()
        return self._understood(response, data, plain)

    def _connection(self) -> HTTPConnection:
        if self._secure:
            return HTTPSConnection(self._host, self._port, timeout=self.connect_seconds)
        return HTTPConnection(self._host, self._port, timeout=self.connect_seconds)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        return headers if self._key is None else {**headers, "Authorization": f"Bearer {self._key}"}

    def _understood(self, response: HTTPResponse, data: bytes, plain: bool) -> Any:
        status = response.status
        if status in AGAIN:
            raise _Again(self._words(status, data), _retry_after(response.headers.get("Retry-After")))
        if status != 200:
            raise Refused(f"endpoint {self.url}: {self._words(status, data)}", status)
        if response.length:
            raise _Again("the connection broke in the middle of the answer")
        try:
            return data.decode("utf-8", "replace") if plain else json.loads(data)
        except ValueError:
            start = data[:60].decode("utf-8", "replace")
            raise _Again(f"answered with something that is not JSON: {self._hidden(start)!r}") from None

    def _words(self, status: int, data: bytes) -> str:
        """Status and the server's own message."""
        text = data.decode("utf-8", "replace")
        try:
            answer = json.loads(text)
            inner = answer.get("error", answer)
            text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
        except (ValueError, AttributeError):
            pass
        return f"HTTP {status}: {self._hidden(' '.join(text.split())[:SHOWN]) or 'no message'}"

    def _hidden(self, text: str) -> str:
        return text if not self._key else text.replace(self._key, "***")


def _read(response: HTTPResponse, held: socket.socket, deadline: float) -> bytes:
    """The whole body, in the time that is left, however slowly it trickles."""
    parts: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        held.settimeout(left)
        part = response.read1(1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _reason(error: Exception) -> str:
    """An OSError's or HTTPException's cause in words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{text[0].lower()}{text[1:]}"


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
