"""A small hub on this machine: the calls of the Hugging Face hub that `huggingface_hub` makes to push and pull a model.

Written after the requests of huggingface_hub 0.30, 1.33 and 2.4, without Xet. `fail` makes it misbehave.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

LFS = (".safetensors", ".mp4", ".png")  # files that the hub keeps in its storage of large files


def blob_id(data):
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path, data):
    """Whether the hub keeps a file in its storage of large files, which has no empty ones."""
    return path.endswith(LFS) and bool(data)


def oid_of(path, data):
    """The hash by which the hub tells whether a file has changed."""
    return hashlib.sha256(data).hexdigest() if is_large(path, data) else blob_id(data)


class Repo:
    """A model repository: commits, each a dict of path -> bytes, and the branches that name them."""

    def __init__(self, private=False):
        self.private, self.commits, self.branches, self.messages = private, {}, {}, []
        self.links = set()  # paths that are no plain files
        self.commit({".gitattributes": b"*.mp4 filter=lfs\n"}, "main", "initial commit")

    def commit(self, files, branch="main", message="by hand"):
        """A new commit of these files; returns its hash."""
        text = json.dumps([sorted((path, blob_id(data)) for path, data in files.items()), len(self.commits)])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        self.messages.append(message)
        return sha

    def change(self, **files):
        """A new commit on main with some files changed, those that are None deleted; `__` stands for a dot."""
        new = {name.replace("__", "."): data for name, data in files.items()}
        left = {**self.head, **new}
        return self.commit({path: data for path, data in left.items() if data is not None})

    @property
    def head(self):
        return self.commits[self.branches["main"]]

    def resolve(self, revision):
        """The whole hash that a revision names, or None."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Hub:
    """`with Hub() as hub:` serves at `hub.url`. `hub.requests` lists "METHOD path"; `hub.fail` maps a regular
    expression for such a line to a status, "drop" (the connection), "half" or "other" (bytes of the answer)."""

    def __init__(self):
        self.repos, self.blobs, self.requests, self.fail = {}, {}, [], {}
        self.tokens = {"hf_good": "ann"}
        self.readers = {"hf_reader": "rob"}  # tokens without the right to write
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.storage = f"http://localhost:{self._server.server_port}"  # another host, as that of large files is

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *words):
        pass

    def answer(self, content=b"", status=200, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = len(data) // 2 if self.failure == "half" else len(data)
            self.wfile.write(data[:cut])
            self.close_connection = self.close_connection or cut < len(data)

    def error(self, status, code="", message=""):
        headers = {"X-Error-Code": code} if code else {}
        self.answer({"error": message or code}, status, **headers, **({"X-Error-Message": message} if message else {}))

    def handle_any(self):
        address = urlsplit(self.path)
        path, self.query = unquote(address.path), address.query
        line = f"{self.command} {path}"
        self.hub.requests.append(line)
        length = self.headers.get("Content-Length")
        self.body = self.rfile.read(int(length)) if length else self.chunks()
        self.failure = next((what for rule, what in self.hub.fail.items() if re.search(rule, line)), None)
        if self.failure == "drop":
            self.close_connection = True
            return
        if isinstance(self.failure, int):
            self.error(self.failure)
            return
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.user = (self.hub.tokens | self.hub.readers).get(self.token)
        if self.token and not self.user:
            self.error(401, message="Invalid credentials in Authorization header")
            return
        for pattern, call in ROUTES:
            if match := re.fullmatch(pattern, line):
                call(self, *match.groups())
                return
        self.error(404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def chunks(self):
        """The body of a request in chunks, or nothing."""
        found = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return found

    # ------------------------------------------------------------------ account and repositories
    def whoami(self):
        self.answer({"name": self.user, "type": "user", "orgs": []}) if self.user else self.error(401)

    def create(self):
        told = json.loads(self.body)
        owner = told.get("organization") or self.user
        if self.token in self.hub.readers:
            self.error(403, message="You don't have the rights to create a model under this namespace")
            return
        if owner not in (self.user, "team"):
            self.error(403, message="You don't have the rights to create a model under this namespace")
            return
        name = f"{owner}/{told['name']}"
        status = 409 if name in self.hub.repos else 200
        private = told.get("private") or told.get("visibility") == "private"
        self.hub.repos.setdefault(name, Repo(private))
        self.answer({"url": f"{self.hub.url}/{name}", "error": "You already created this model repo"}, status)

    def found(self, name, revision=None, write=False):
        """The repository and the hash of a revision; None, None where that was answered by an error."""
        repo = self.hub.repos.get(name)
        owner = name.partition("/")[0]
        mine = self.user is not None and owner in (self.user, "team")
        if repo is None or (repo.private and not mine):
            self.error(404 if self.user else 401, "RepoNotFound", "Repository not found")
        elif write and (not mine or self.token in self.hub.readers):
            self.error(403, message="Authorization error.")
        elif revision is not None and repo.resolve(revision) is None:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo, repo.resolve(revision or "main")
        return None, None

    def info(self, name, revision="main"):
        repo, sha = self.found(name, revision or "main")
        if repo:
            files = [{"rfilename": path} for path in repo.commits[sha]]
            self.answer({"id": name, "modelId": name, "sha": sha, "private": repo.private, "siblings": files,
                         "tags": [], "downloads": 0, "likes": 0})  # fmt: skip

    def tree(self, name, revision):
        repo, sha = self.found(name, revision)
        if not repo:
            return
        entries, folders = [], set()
        for path, data in sorted(repo.commits[sha].items()):
            lies = path[0] in "./"  # a path that no real hub would name
            if "/" in path and not lies and "recursive=true" not in self.query.lower():
                folders.add(path.partition("/")[0])
                continue
            entry = {"type": "file", "oid": blob_id(data), "size": len(data), "path": path}
            if is_large(path, data):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            if path in repo.links:
                entry = {"type": "symlink", "oid": blob_id(data), "path": path}
            entries.append(entry)
        entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)]
        self.answer(entries)

    def branch(self, name, branch):
        repo, sha = self.found(name, write=True)
        if repo:
            status = 409 if branch in repo.branches else 201
            repo.branches.setdefault(branch, sha)
            self.answer({"error": "Reference already exists"} if status == 409 else {}, status)

    # ------------------------------------------------------------------ upload
    def validate(self):
        content = json.loads(self.body)["content"]
        try:
            meta = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", content, flags=re.S)[1])
            assert isinstance(meta, dict)
            self.answer({"errors": [], "warnings": []})
        except Exception as error:
            self.answer({"errors": [{"message": str(error)}], "warnings": [], "error": "bad"}, 400)

    def preupload(self, name, revision):
        repo, sha = self.found(name, revision, write=True)
        if repo:
            there = {path: oid_of(path, data) for path, data in repo.commits[sha].items()}
            files = [{"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                      "shouldIgnore": False, **({"oid": there[file["path"]]} if file["path"] in there else {})}
                     for file in json.loads(self.body)["files"]]  # fmt: skip
            self.answer({"files": files})

    def batch(self, name):
        repo, _ = self.found(name, write=True)
        if not repo:
            return
        objects = []
        for each in json.loads(self.body)["objects"]:
            actions = {
                kind: {"href": f"{self.hub.storage}/storage/{kind}/{each['oid']}"} for kind in ("upload", "verify")
            }
            known = each["oid"] in self.hub.blobs
            objects.append({"oid": each["oid"], "size": each["size"], **({} if known else {"actions": actions})})
        self.answer({"transfer": "basic", "objects": objects})

    def upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.error(400)
            return
        self.hub.blobs[oid] = self.body
        self.answer()

    def verify(self, oid):
        told = json.loads(self.body)
        right = told["oid"] == oid and len(self.hub.blobs.get(oid, b"")) == told["size"]
        self.answer({}) if right else self.error(422)

    def commit(self, name, revision):
        repo, sha = self.found(name, revision, write=True)
        if not repo:
            return
        files, message = dict(repo.commits[sha]), ""
        for line in self.body.splitlines():
            told = json.loads(line)
            value = told["value"]
            if told["key"] == "header":
                message = value["summary"]
            elif told["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif told["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif told["key"] == "deletedFile":
                del files[value["path"]]
        new = repo.commit(files, revision, message)
        self.answer({"success": True, "commitOid": new, "commitUrl": f"{self.hub.url}/{name}/commit/{new}"})

    # ------------------------------------------------------------------ download
    def resolve(self, name, revision, path):
        repo, sha = self.found(name, revision)
        if not repo:
            return
        data = repo.commits[sha].get(path)
        if data is None:
            self.error(404, "EntryNotFound")
            return
        about = {"X-Repo-Commit": sha, "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if is_large(path, data):  # kept elsewhere
            oid = hashlib.sha256(data).hexdigest()
            self.hub.blobs.setdefault(oid, data)
            about |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{oid}"', "ETag": f'"{blob_id(data)}"'}
            self.answer(b"", 302, **about, Location=f"{self.hub.storage}/storage/upload/{oid}")
            return
        self.part(data, about | {"ETag": f'"{blob_id(data)}"'})

    def storage(self, oid):
        self.part(self.hub.blobs[oid], {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream"})

    def part(self, data, about):
        """The data, or the range of it that is asked for."""
        if self.failure == "other":
            data = bytes([data[0] ^ 1]) + data[1:]
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), int(match[2] or len(data) - 1)
            about |= {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            self.answer(data[first : last + 1], 206, **about)
        elif self.command == "HEAD":
            self.answer(b"", 200, **about, **{"Content-Length": str(len(data))})
        else:
            self.answer(data, 200, **about)


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"GET /api/whoami-v2", Handler.whoami),
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate),
    (rf"GET /api/models/{NAME}", Handler.info),
    (rf"GET /api/models/{NAME}/revision/([\w.-]+)", Handler.info),
    (rf"GET /api/models/{NAME}/tree/([\w.-]+)/?", Handler.tree),
    (rf"POST /api/models/{NAME}/branch/([\w.-]+)", Handler.branch),
    (rf"POST /api/models/{NAME}/preupload/([\w.-]+)", Handler.preupload),
    (rf"POST /api/models/{NAME}/commit/([\w.-]+)", Handler.commit),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /storage/upload/(\w+)", Handler.upload),
    (r"POST /storage/verify/(\w+)", Handler.verify),
    (r"(?:GET|HEAD) /storage/upload/(\w+)", Handler.storage),
    (rf"(?:GET|HEAD) /{NAME}/resolve/([\w.-]+)/(.+)", Handler.resolve),
]
