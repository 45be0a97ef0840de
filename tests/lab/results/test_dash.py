"""`solo dash`: it reads what has changed, shows what `solo report` would say, and hands out films only."""

import base64
import fcntl
import hashlib
import http.client
import json
import os
import re
import threading

import browser
import numpy as np
import pytest

from solorl.lab.results import comparison, dash, page
from solorl.lab.results.read import read_all

TOTAL = 40_000


def rows_of(level, begin=0, end=TOTAL, seed=0):
    """Episodes that come nearer to `level`, a row of speed and an evaluation at times."""
    rng, found = np.random.default_rng(seed), []
    for step in range(begin + 200, end + 1, 200):
        row = {"global_step": step, "wall_time": step / 1_000}
        score = level * step / TOTAL + rng.normal(0, 5)
        found.append(row | {"charts/episodic_return": score, "charts/episodic_length": 90.0})
        if step % 2_000 == 0:
            found.append(row | {"charts/SPS": 1_000, "losses/value_loss": 0.5})
        if step % 4_000 == 0:
            found.append(row | {"eval/episodic_return": score + 1, "eval/episodic_return_std": 2.0})
    return found


def text_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def a_run(tmp_path):
    """`a_run(seed, level=...)` makes a run folder below tmp_path / "runs"."""

    def call(seed=1, level=100, end=TOTAL, env_id="CartPole-v1", script="ppo", status="finished", name="", **more):
        folder = tmp_path / "runs" / (name or f"{env_id}__{script}__{seed}__{len(more)}")
        folder.mkdir(parents=True)
        args = {"env_id": env_id, "seed": seed, "exp_name": script, "total_timesteps": TOTAL, "lr": 0.1} | more
        config = {"script": f"{script}.py", "script_sha256": script, "args": args, "started": "2026-11-27"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "status.json").write_text(json.dumps({"status": status, "global_step": end, "wall_time": 9.0}))
        (folder / "metrics.jsonl").write_text(text_of(rows_of(level, end=end, seed=seed)))
        return folder

    return call


@pytest.fixture
def store(tmp_path):
    (tmp_path / "runs").mkdir(exist_ok=True)
    return dash.Store(tmp_path / "runs")


def data_of(store, first=""):
    """The data of the charts."""
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', store.page(first).decode())[1])


def notes_of(store):
    return re.findall(r"<li>(.*?)</li>", store.page().decode())


def cells(store, part, first=""):
    """The rows of the tables in a part of the page, each a list of texts."""
    end = {"live": "<h2>Curves</h2>", "groups": "<ul"}[part]
    rows = store.page(first).decode().partition(f'id="{part}"')[2].partition(end)[0].split("<tr>")
    return [re.findall(r"<td>(.*?)</td>", row) for row in rows if "<td>" in row]


@pytest.fixture
def reads(monkeypatch):
    """The names of the runs that were read."""
    real, found = dash.read_run, []
    monkeypatch.setattr(dash, "read_run", lambda run: found.append(run.name) or real(run))
    return found


# ---------------------------------------------------------------------- what is shown
def test_curves_are_those_of_the_report(a_run, store, tmp_path):
    for seed in range(1, 6):
        a_run(seed)
        a_run(seed, level=50, lr=0.5)
    runs, _ = read_all([tmp_path / "runs"])
    expected, shown = page._data(comparison.compare(runs, as_given=True), "steps"), data_of(store)
    assert shown == expected and len(shown["methods"]) == 2
    lines = shown["panels"][0]["lines"]
    assert set(lines) == {"eval steps", "eval time", "train steps", "train time"}
    assert [line["band"] for line in lines["eval steps"]] == ["interval", "interval"]
    name, counts, score, at, of = cells(store, "groups")[0]
    assert (name, counts, at, of) == ("ppo lr=0.1", "5 finished", "40,000", "evaluation")
    assert score.startswith(f"<b>{lines['eval steps'][0]['y'][-1]:.1f}</b><small>[")


def test_groups_are_environment_script_and_arguments_but_the_seed(a_run, store):
    for seed in (1, 2):
        a_run(seed)
        a_run(seed, lr=0.5)
        a_run(seed, script="dqn")
        a_run(seed, env_id="Acrobot-v1")
    rows = cells(store, "groups")[:4]
    assert sorted(row[0] for row in rows) == ["dqn", "ppo lr=0.1", "ppo lr=0.1", "ppo lr=0.5"]
    assert {row[1] for row in rows} == {"2 finished"}


def test_a_group_can_be_compared_with_any_other(a_run, store):
    for seed, level in ((1, 100), (2, 110), (3, 120)):
        a_run(seed, level)
        a_run(seed, level - 25, lr=0.5)
        a_run(seed, 3, script="dqn", gamma=0.5)
    found = {row[0]: row for row in cells(store, "groups", "ppo lr=0.1")[3:]}
    assert found["ppo lr=0.5"][1] == '<span class="names">lr 0.5 (there 0.1)</span>'
    assert found["dqn"][1] == '<span class="names">gamma 0.5 (there missing), the script itself</span>'
    assert found["dqn"][2] == "enough: 2 of each"
    x, y = (
        np.array([line[-1] for line in of["seeds"].values()])
        for of in data_of(store)["panels"][0]["lines"]["eval steps"][1:]
    )
    pooled = (x.var(ddof=1) + y.var(ddof=1)) / 2
    needed = int(np.ceil(2 * (1.959964 + 0.841621) ** 2 * pooled / (x.mean() - y.mean()) ** 2))
    assert needed > 3 and found["ppo lr=0.5"][2] == f"about {needed - 3} of each, {needed} in all"


def test_one_seed_tells_nothing_about_seeds(a_run, store):
    a_run(1)
    a_run(1, lr=0.5)
    assert cells(store, "groups")[-1][-1] == "-"


def test_a_run_that_broke_off_does_not_cut_the_curve(a_run, store):
    for seed in (1, 2, 3):
        a_run(seed)
    a_run(4, end=8_000, status="failed")
    a_run(5, end=TOTAL - 2_000, status="failed")
    line = data_of(store)["panels"][0]["lines"]["train steps"][0]
    assert set(line["seeds"]) == {"1", "2", "3", "5"} and line["x"][-1] == TOTAL - 2_000
    assert cells(store, "groups")[0][1] == "3 finished, 2 failed"


def test_a_run_that_trains_has_speed_time_left_and_where_its_time_goes(a_run, store):
    folder = a_run(7, end=10_000, status="running")
    assert cells(store, "live") == [] and cells(store, "groups")[0][1] == "1 killed"
    with open(folder / "metrics.jsonl", "a") as file:
        times = {"time/environment": 3.0, "time/update": 6.0, "time/other": 1.0}
        file.write(text_of([{"global_step": 12_000, "wall_time": 12.5, "charts/SPS": 500, **times}]))
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [[name, done, speed, left, last, evaluation, goes]] = cells(store, "live")
    rows = rows_of(100, end=10_000, seed=7)
    returns = [row["charts/episodic_return"] for row in rows if "charts/episodic_return" in row]
    evals = [row["eval/episodic_return"] for row in rows if "eval/episodic_return" in row]
    assert (name, done, speed, left) == ("CartPole-v1: ppo, seed 7", "12,000 (30%)", "500", "56 s")
    assert (last, evaluation) == (f"{np.mean(returns[-100:]):.1f}", f"{evals[-1]:.1f}")
    assert goes == "environment 30%, update 60%, other 10%"
    assert cells(store, "groups")[0][1] == "1 killed"


def test_numbers_that_are_none_are_not_shown(a_run, store):
    folder = a_run(1, end=10_000, status="running")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            '{"global_step": 12000, "wall_time": 9, "charts/episodic_return": NaN, "eval/episodic_return": NaN}\n'
        )
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [[_, done, speed, *rest]] = cells(store, "live")
    assert (done, speed, rest[-1]) == ("12,000 (30%)", "1,000", "-") and "nan" not in "".join(rest)


# ---------------------------------------------------------------------- only what has changed is read
def test_only_what_has_changed_is_read_also_after_a_new_start(a_run, store, reads, tmp_path):
    one, two = a_run(1, end=10_000), a_run(2, end=10_000)
    store.page()
    assert sorted(reads) == sorted([one.name, two.name])
    reads.clear()
    store.page()
    assert reads == []
    with open(one / "metrics.jsonl", "a") as file:
        file.write(text_of(rows_of(100, 10_000, 20_000, seed=1)))
        file.write('{"global_step": 20')  # a row that is being written
    lines = data_of(store)["panels"][0]["lines"]["train steps"]
    assert reads == [one.name]
    store.keep()
    reads.clear()
    assert data_of(dash.Store(tmp_path / "runs"))["panels"][0]["lines"]["train steps"] == lines
    assert reads == []
    (tmp_path / "runs/.solo/dash.json").unlink()
    assert data_of(dash.Store(tmp_path / "runs"))["panels"][0]["lines"]["train steps"] == lines


def test_a_run_that_was_cut_back_and_has_grown_is_read_again(a_run, store):
    """Also where the new rows are as long as the old ones."""
    path = a_run(1) / "metrics.jsonl"
    before = data_of(store)
    path.write_text(path.read_text().translate(str.maketrans("1234568", "7777777")))
    assert data_of(store) != before


def test_a_group_is_drawn_again_only_where_a_run_has_gone_on(a_run, store, monkeypatch):
    drawn, real = [], dash.curve_of
    monkeypatch.setattr(dash, "curve_of", lambda runs, *rest: drawn.append(runs[0].env_id) or real(runs, *rest))
    a_run(1), a_run(1, env_id="Acrobot-v1")
    store.page()
    assert set(drawn) == {"CartPole-v1", "Acrobot-v1"}
    store.keep()
    drawn.clear()
    a_run(2)
    dash.Store(store.folder).page()
    assert set(drawn) == {"CartPole-v1"}


@pytest.mark.parametrize(
    "kept", ["", "[]", '{"format": 0, "runs": 3}', '{"format": 2, "runs": {"CartPole-v1__ppo__1__0": {"at": 3}}}']
)
def test_what_was_kept_may_be_damaged(a_run, store, tmp_path, kept):
    a_run(1)
    expected = data_of(store)
    (tmp_path / "runs/.solo").mkdir(exist_ok=True)
    (tmp_path / "runs/.solo/dash.json").write_text(kept)
    assert data_of(dash.Store(tmp_path / "runs")) == expected


# ---------------------------------------------------------------------- what is broken
def test_a_damaged_line_costs_a_sentence_with_its_number(a_run, store):
    a_run(1)
    folder = a_run(2)
    store.page()
    lines = len((folder / "metrics.jsonl").read_text().splitlines())
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 41000}\nnonsense\n')
    [note] = notes_of(store)
    assert f"metrics.jsonl is damaged in line {lines + 2}" in note
    assert set(data_of(store)["panels"][0]["lines"]["eval steps"][0]["seeds"]) == {"1"}
    (folder / "metrics.jsonl").write_text(text_of(rows_of(100, seed=2)))
    assert notes_of(store) == [] and len(data_of(store)["panels"][0]["lines"]["eval steps"][0]["seeds"]) == 2


def test_other_broken_runs_cost_a_sentence_each(a_run, store, tmp_path):
    a_run(1)
    (a_run(2) / "config.json").write_text("{")
    (a_run(3) / "status.json").write_text("[]")
    odd = a_run(4)
    (odd / "metrics.jsonl").write_text(text_of([{"global_step": 5, "wall_time": 1, "charts/episodic_return": "x"}]))
    pipe = a_run(5) / "metrics.jsonl"
    pipe.unlink()
    os.mkfifo(pipe)
    secret = tmp_path / "secret.json"
    secret.write_text((a_run(6) / "config.json").read_text())
    (tmp_path / "runs/CartPole-v1__ppo__6__0/config.json").unlink()
    (tmp_path / "runs/CartPole-v1__ppo__6__0/config.json").symlink_to(secret)
    away = a_run(7).rename(tmp_path / "away")
    (tmp_path / "runs/link").symlink_to(away)
    notes = notes_of(store)
    assert [re.search(r"__(\d)__0", note)[1] for note in notes] == ["2", "3", "4", "5", "6"], notes
    assert set(data_of(store)["panels"][0]["lines"]["eval steps"][0]["seeds"]) == {"1"}


def test_an_empty_folder_is_a_page(store):
    assert data_of(store)["panels"] == [] and "Nothing runs." in store.page().decode()


def test_names_cannot_script_the_page(a_run, store):
    evil = "<img src=x onerror=alert(1)>"
    a_run(1, env_id=evil, name="<b>"), a_run(1, env_id=evil, name="<i>", lr=evil)
    a_run(2, env_id=evil, name="<u>")
    folder = store.folder / "<u>"
    (folder / "videos").mkdir()
    (folder / 'videos/"><s>.mp4').write_bytes(b"")
    (folder / "metrics.jsonl").write_text("<script>alert(1)</script>\n")
    (store.folder / "<i>" / "videos").mkdir()
    (store.folder / '<i>/videos/"><s>.mp4').write_bytes(b"")
    text = store.page(f"ppo lr={evil}").decode()
    assert "<h2>Against ppo lr=&lt;img" in text
    body = text.partition("<body>")[2].partition("<script>")[0]
    assert not re.search(r"<(img|b>|i>|u>|s>)", re.sub(r"<b>[\d.]+</b>", "", body)) and body.count("</script>") == 1
    assert body.count("&lt;img") > 3


# ---------------------------------------------------------------------- what is handed out
@pytest.fixture
def ask(store):
    """`ask("/", "GET", Host=...)` gives status, headers and content."""
    server = dash.Server(store, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()

    def call(path, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for header in headers.items():
            connection.putheader(*header)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    call.address = server.address
    yield call
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_page_runs_its_own_scripts_only(ask, a_run):
    a_run(1)
    status, headers, content = ask("/")
    scripts = re.findall(rb"<script>(.*?)</script>", content, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one).digest()).decode() for one in scripts]
    policy = headers["Content-Security-Policy"]
    assert status == 200 and len(hashes) == 2 and "default-src 'none'" in policy
    assert "script-src {};".format(" ".join(f"'sha256-{one}'" for one in hashes)) in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, headers, none = ask("/", "HEAD")
    assert status == 200 and none == b"" and int(headers["Content-Length"]) == len(content)


def test_only_this_machine_is_answered(ask):
    assert ask.address.startswith("http://127.0.0.1:")
    assert [ask("/", Host=name)[0] for name in ("127.0.0.1:1", "localhost:9", "localhost")] == [200] * 3
    for name in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        status, _, content = ask("/", Host=name)
        assert status == 403 and b"Trainings" not in content


def test_nothing_but_films_is_handed_out(ask, a_run, tmp_path):
    folder = a_run(1, name="a run#1")
    (folder / "videos").mkdir()
    (folder / "videos/step_9.mp4").write_bytes(b"film")
    (folder / "videos/.step_10.mp4").write_bytes(b"half a film")
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (folder / "videos/step_5.mp4").symlink_to(tmp_path / "secret.mp4")
    page_of = ask("/")[2].decode()
    addresses = re.findall(r'<option value="([^"]+)" data-env="CartPole-v1" data-step="(\d+)">', page_of)
    assert addresses == [("film/a%20run%231/videos/step_5.mp4", "5"), ("film/a%20run%231/videos/step_9.mp4", "9")]
    status, headers, content = ask("/film/a%20run%231/videos/step_9.mp4")
    assert (status, headers["Content-Type"], content) == (200, "video/mp4", b"film")
    for path in (
        "film/a%20run%231/videos/step_5.mp4", "film/a%20run%231/videos/.step_10.mp4", "film/a%20run%231/config.json",
        "film/a%20run%231/videos/../config.json", "film/../secret.mp4", "film/%2e%2e/secret.mp4", "config.json",
        "film//etc/passwd", "../../etc/passwd", "film/", "dash.js",
    ):  # fmt: skip
        status, _, content = ask(f"/{path}")
        assert status == 404 and b"secret" not in content and b"half" not in content, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask("/", method)[0] == 501


def test_a_film_that_is_gone_or_too_large_is_not_found(ask, a_run, monkeypatch, capfd):
    folder = a_run(1, name="a")
    (folder / "videos").mkdir()
    for step, content in ((1, b"film"), (2, b"a film"), (3, b"film")):
        (folder / f"videos/step_{step}.mp4").write_bytes(content)
    ask("/")
    monkeypatch.setattr(dash, "MOST_FILM", 5)
    (folder / "videos/step_3.mp4").unlink()
    assert [ask(f"/film/a/videos/step_{step}.mp4")[0] for step in (1, 2, 3)] == [200, 404, 404]
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not browser.find():
        pytest.skip("there is no Chromium")
    one = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def wait_for(chromium, condition):
    """Wait until an expression on the page is true, for 20 seconds."""
    check = f"const go = i => {condition} ? done(true) : i ? setTimeout(go, 100, i - 1) : done(false); go(200);"
    assert chromium.run(f"new Promise(done => {{ {check} }})"), condition


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_works_without_a_network(chromium, ask, a_run, width):
    for seed in (1, 2, 3, 4):
        (
            a_run(seed, env_id="<b>Env</b>-v0"),
            a_run(seed, env_id="<b>Env</b>-v0", script="a_script_with_a_long_name", lr=7),
        )
    for dark in (False, True):
        chromium.open(ask.address, width, dark=dark)
        wait_for(chromium, "document.querySelectorAll('.panels canvas').length === 1")
        assert chromium.problems == []
        assert chromium.run("document.documentElement.scrollWidth") <= width
        assert chromium.run("document.querySelectorAll('main b').length") == 2  # the two scores
        background = chromium.run("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(19, 20, 22)") == dark


def test_the_page_takes_over_what_is_new(chromium, ask, a_run):
    folder = a_run(1, end=10_000, status="running")
    (folder / "videos").mkdir()
    for step in (4_000, 8_000):
        (folder / f"videos/step_{step}.mp4").write_bytes(b"film")
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        chromium.open(ask.address)
        wait_for(chromium, "document.getElementById('live').textContent.includes('10,000 (25%)')")
        chromium.run("window.mine = true; document.querySelector('.controls button:nth-of-type(2)').click()")
        assert chromium.run("document.getElementById('films').value").endswith("step_8000.mp4")
        pick = (
            "document.querySelector('figure').dispatchEvent(new CustomEvent('pick', {detail: ['CartPole-v1', 4500]}))"
        )
        chromium.run(pick)
        assert chromium.run("document.getElementById('films').value").endswith("step_4000.mp4")
        wait_for(chromium, "document.getElementById('film').src.startsWith('blob:')")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(text_of(rows_of(100, 10_000, 20_000)))
        wait_for(chromium, "document.getElementById('live').textContent.includes('20,000 (50%)')")
    assert chromium.run("window.mine")  # the page was not loaded again
    pressed = "document.querySelector('.controls button:nth-of-type(2)').getAttribute('aria-pressed')"
    assert chromium.run(pressed) == "true"
    assert chromium.run("document.getElementById('films').value").endswith("step_4000.mp4")
    assert [one for one in chromium.problems if "film" not in one] == []
