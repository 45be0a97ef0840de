"""What leaves this machine: the image, the files of Terraform, of GitHub, of Kubernetes and of SkyPilot.

None of these services is here. So the tests read the files as their own tools do: parsers, schemas, a container build.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import hcl2
import pytest
import yaml
from conftest import ROOT, environment
from study_tasks import FAKE

from solorl.lab.studies.worker import AGAIN, GRACE

# Kubernetes and SkyPilot: the examples of docs/cloud.md

JOB, TASK = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/cloud.md").read_text(), flags=re.S)


def test_the_examples_start_a_worker_of_the_study(solo, tmp_path, monkeypatch):
    """Their command, with a folder in place of the bucket, trains what `solo bench --workers 0` has planned."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(FAKE, "fake.py")
    [worker] = yaml.safe_load(JOB)["spec"]["template"]["spec"]["containers"]
    program = f"docker() {{ shift 4; printf '%s\\n' \"$@\"; }}\n{yaml.safe_load(TASK)['run']}"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [worker["image"], *worker["args"]] and "command" not in worker
    words = "bench fake.py --env-ids CartPole-v1 --num-seeds 2 --workers 0 --storage study".split()
    code, _, err = solo(*words)
    assert code == 0 and not Path("study/tasks").exists(), err
    assert solo(*["study" if word == "s3://bucket/study" else word for word in worker["args"]])[0] == 0
    assert solo("bench", "status", "study")[1].endswith("fake: 2 tasks: 2 finished\n")


def test_what_was_interrupted_begins_again_and_bad_input_does_not():
    """The worker says 75 where it saved and stopped, 2 where no repetition helps."""
    spec, task = yaml.safe_load(JOB)["spec"], yaml.safe_load(TASK)
    disrupted, stopped, bad = spec["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore" and disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [AGAIN, 137])
    assert (bad["action"], bad["onExitCodes"]["values"]) == ("FailIndex", [2])
    [worker] = spec["template"]["spec"]["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in (stopped, bad)} == {worker["name"]}
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == GRACE
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [AGAIN]


# Terraform

TEXTS = [path.read_text() for path in sorted((ROOT / "cloud/aws").glob("*.tf"))]
parsed = functools.cache(hcl2.loads)  # a second for all


def declared(texts):
    """`var.x`, `local.x`, `TYPE.NAME` and `data.TYPE.NAME` of all blocks."""
    found = set()
    for text in texts:
        tree = parsed(text)
        found |= {f"var.{name}" for name in names(tree, "variable")}
        found |= {f"local.{name}" for block in tree.get("locals", []) for name in block if not name.startswith("__")}
        found |= {f"{kind}.{name}" for kind, name in typed(tree, "resource")}
        found |= {f"data.{kind}.{name}" for kind, name in typed(tree, "data")}
    return found


def names(tree, kind):
    return [name.strip('"') for block in tree.get(kind, []) for name in block if not name.startswith("__")]


def typed(tree, kind):
    for block in tree.get(kind, []):
        for resource, inner in block.items():
            if not resource.startswith("__"):
                yield from ((resource.strip('"'), name.strip('"')) for name in inner)


def bodies(texts, kind, resource):
    """Name -> body of all blocks of a type."""
    return {
        name.strip('"'): body
        for text in texts
        for block in parsed(text).get(kind, [])
        for found, inner in block.items()
        if found.strip('"') == resource
        for name, body in inner.items()
    }


def expressions(value):
    """The text of every expression: strings of the parser in ${}, and what stands in ${} inside of strings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not key.startswith("__"):
                yield from expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)
    elif isinstance(value, str):
        outer = re.fullmatch(r"\$\{(.*)\}", value, flags=re.S)
        plain = outer[1] if outer else value
        inside = re.findall(r"\$\{([^}]*)\}", plain)
        yield from inside
        if outer:
            yield re.sub(r'"[^"]*"', "", plain)


def references(text):
    found = set()
    for expression in expressions(parsed(text)):
        found |= set(re.findall(r"(?<![\w.])(?:data\.aws_\w+\.\w+|aws_\w+\.\w+|var\.\w+|local\.\w+)", expression))
    return found


def test_every_reference_of_terraform_is_declared():
    there = declared(TEXTS)
    used = set().union(*map(references, TEXTS))
    assert used - there == set() and len(used) > 40
    assert {name for name in there if name.startswith(("var.", "local."))} - used == set(), "declared, but not used"
    assert references('x = { a = "${var.gone}-x", b = [aws_s3_bucket.b.id], c = data.aws_vpc.c[0].id }') == {
        "var.gone", "aws_s3_bucket.b", "data.aws_vpc.c",
    }  # fmt: skip


def test_the_parser_hears_what_is_no_terraform():
    with pytest.raises(Exception, match="Unexpected token"):
        hcl2.loads('resource "aws_s3_bucket" { bucket = = 1 }')


def test_every_variable_and_output_says_what_it_is():
    for text in TEXTS:
        tree = parsed(text)
        for kind in ("variable", "output"):
            for block in tree.get(kind, []):
                for name, body in block.items():
                    assert name.startswith("__") or len(body["description"]) > 10, name


ACTION = re.compile(r'^\s*"([a-z0-9]+:[A-Za-z*]+)",(.*)$', flags=re.M)


def test_every_right_has_its_reason():
    text = (ROOT / "cloud/aws/rights.tf").read_text()
    rights = ACTION.findall(text)
    in_tree = [
        action.strip('"')
        for body in bodies(TEXTS, "data", "aws_iam_policy_document").values()
        for statement in body["statement"]
        for action in statement["actions"]
    ]
    assert sorted(in_tree) == sorted([action for action, _ in rights] + ["s3:*"]), "one action a line"
    assert [action for action, rest in rights if not re.match(r"\s*# [`\w].{6}", rest)] == []


def test_no_right_is_wider_than_it_must_be():
    documents = bodies(TEXTS, "data", "aws_iam_policy_document")
    for name, body in documents.items():
        for statement in body["statement"]:
            wide = [action for action in statement["actions"] if "*" in action]
            assert not wide or statement.get("effect") == '"Deny"', name
            if '"*"' in statement.get("resources", []):  # AWS knows no narrower form of these
                assert {action.strip('"').partition(":")[2] for action in statement["actions"]} <= {
                    "DiscoverPollEndpoint", "GetAuthorizationToken",
                }, name  # fmt: skip
    study = documents["study"]["statement"]
    assert [statement["resources"] for statement in study] == [["${local.studies}"], ["${aws_s3_bucket.studies.arn}"]]
    assert study[1]["actions"] == ['"s3:ListBucket"'] and "condition" not in study[1], "absent must not be forbidden"
    [job] = [body for body in bodies(TEXTS, "resource", "aws_iam_role_policy").values() if "role.job" in body["role"]]
    assert job["policy"] == "${data.aws_iam_policy_document.study.json}", "a job has the rights to its study, no others"


def test_who_submits_may_do_what_the_engine_does_and_no_more():
    engine = (ROOT / "solorl/lab/studies/engines/aws.py").read_text()
    called = {name.title().replace("_", "") for name in re.findall(r"\)\.([a-z]+_[a-z_]+)\(\*\*request", engine)}
    [submit] = [body for name, body in bodies(TEXTS, "data", "aws_iam_policy_document").items() if name == "submit"]
    allowed = {action.strip('"') for statement in submit["statement"] for action in statement["actions"]}
    assert {action.partition(":")[2] for action in allowed} == called == {"SubmitJob"}


def test_the_bucket_is_private_and_encrypted():
    [block] = bodies(TEXTS, "resource", "aws_s3_bucket_public_access_block").values()
    flags = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
    assert [block[flag] for flag in flags] == [True] * 4
    [encryption] = bodies(TEXTS, "resource", "aws_s3_bucket_server_side_encryption_configuration").values()
    assert "AES256" in str(encryption)
    [deny] = bodies(TEXTS, "data", "aws_iam_policy_document")["tls_only"]["statement"]
    assert deny["effect"] == '"Deny"' and deny["condition"][0]["variable"] == '"aws:SecureTransport"'


def test_machines_are_spot_and_jobs_start_again_where_they_were_interrupted():
    [environment_] = bodies(TEXTS, "resource", "aws_batch_compute_environment").values()
    assert environment_["compute_resources"][0]["type"] == '"SPOT"'
    [template] = bodies(TEXTS, "resource", "aws_launch_template").values()
    assert template["metadata_options"][0]["http_put_response_hop_limit"] == 1, (
        "a container must not reach its machine's role"
    )
    assert "ECS_ENABLE_SPOT_INSTANCE_DRAINING=true" in template["user_data"], "containers are told"
    assert "ECS_CONTAINER_STOP_TIMEOUT=110s" in template["user_data"]
    [definition] = bodies(TEXTS, "resource", "aws_batch_job_definition").values()
    lost, stopped, killed, rest = definition["retry_strategy"][0]["evaluate_on_exit"]
    assert lost["action"] == stopped["action"] == killed["action"] == '"RETRY"' and rest["action"] == '"EXIT"'
    assert (stopped["on_exit_code"], killed["on_exit_code"]) == ('"75"', '"137"') and lost[
        "on_status_reason"
    ] == '"Host EC2*"'


# GitHub Actions, image, dev container

WORKFLOW = ROOT / ".github/workflows/test.yml"


def test_the_workflow_tests_what_the_project_says_it_supports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    work = yaml.safe_load(WORKFLOW.read_text())
    job = work["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == versions and len(versions) == 4
    assert {each.partition("-")[0] for each in job["strategy"]["matrix"]["os"]} == {"ubuntu", "macos"}
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test"]
    assert work["permissions"] == {"contents": "read"}


def instructions(text):
    """(instruction, argument) of a Dockerfile, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def test_the_image_runs_solo_as_a_user():
    steps = instructions((ROOT / "Dockerfile").read_text())
    last = [words for name, words in steps if name == "FROM"][-1]
    assert last == "base AS run", "what a build without --target makes"
    final = steps[steps.index(("FROM", last)) :]
    assert [words for name, words in final if name == "USER"] == ["1000:1000"]
    assert json.loads(dict(final)["ENTRYPOINT"]) == ["tini", "--", "solo"]


def test_every_stage_of_the_image_can_draw_without_a_screen():
    steps = instructions((ROOT / "Dockerfile").read_text())
    base = steps[steps.index(("FROM", "${BASE} AS base")) :][1][1]
    assert {"libegl1", "libgl1", "libgl1-mesa-dri"} <= set(base.split())


def test_what_the_image_copies_is_there_and_let_through():
    """.dockerignore lets through the sources of COPY and nothing else."""
    steps = instructions((ROOT / "Dockerfile").read_text())
    copied = {
        source for name, words in steps if name == "COPY" and "--from" not in words for source in words.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and copied == allowed and all((ROOT / name).exists() for name in copied)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied >= {*build["packages"], *build["force-include"]}, "the wheel is built from these"


def test_the_dev_container_is_a_stage_of_the_dockerfile():
    folder = ROOT / ".devcontainer"
    settings = json.loads((folder / "devcontainer.json").read_text())
    dockerfile = folder / settings["build"]["dockerfile"]
    assert re.search(rf"^FROM \w+ AS {settings['build']['target']}$", dockerfile.read_text(), flags=re.M)
    assert settings["postCreateCommand"] == "make .venv/.dev"
    assert ".venv/.dev:" in (ROOT / "Makefile").read_text()


# What needs packages of its own, and a network


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A virtual environment with the checkers; far too large for the development lock."""
    return installed(tmp_path_factory, "kubernetes-validate==1.37.0", "check-jsonschema==0.39.0", "zizmor==1.32.0")


def installed(tmp_path_factory, *packages):
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", *packages], check=True)
    return folder / "bin"


def checked(*words, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, **more)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow  # installs 110 MB
def test_the_kubernetes_job_fits_the_schema(tools, tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(JOB)
    bad.write_text(JOB.replace("backoffLimitPerIndex", "backoffLimitPerindex"))
    command = (tools / "kubernetes-validate", "--strict", "--kubernetes-version")
    for version in ("1.33", "1.37"):
        assert checked(*command, version, good)[0] == 0, checked(*command, version, good)[1]
    assert checked(*command, "1.37", bad)[0] != 0


@pytest.mark.slow
@pytest.mark.parametrize("workflow", [WORKFLOW, WORKFLOW.with_name("site.yml")], ids=lambda path: path.stem)
def test_the_workflow_fits_its_schema_and_has_no_known_weakness(tools, tmp_path, workflow):
    schema = (tools / "check-jsonschema", "--builtin-schema", "vendor.github-workflows")
    assert checked(*schema, workflow)[0] == 0, checked(*schema, workflow)[1]
    bad = tmp_path / "bad.yml"
    bad.write_text(workflow.read_text().replace("runs-on", "run-on"))
    assert checked(*schema, bad)[0] != 0
    zizmor = (tools / "zizmor", "--offline", "--no-progress", "--config", ROOT / ".github/zizmor.yml")
    assert checked(*zizmor, workflow)[0] == 0, checked(*zizmor, workflow)[1]
    bad.write_text(workflow.read_text().replace("persist-credentials: false", "persist-credentials: true"))
    assert checked(*zizmor, "--persona", "auditor", bad)[0] != 0


@pytest.mark.slow  # installs about 200 MB
def test_skypilot_reads_the_task(tmp_path_factory, tmp_path):
    tools = installed(tmp_path_factory, "skypilot==0.14.1")
    program = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.name, task.resources, task.run)"
    env = environment(HOME=str(tmp_path), SKYPILOT_DISABLE_USAGE_COLLECTION="1")
    path = tmp_path / "task.yaml"
    for text, wanted in ((TASK, "cpus=2+, mem=4+"), (TASK.replace("# accelerators", "accelerators"), "{'L4': 1}")):
        path.write_text(text)
        code, said = checked(tools / "python", "-c", program, path, env=env)
        assert code == 0 and "[Spot]" in said and wanted in said and "study" in said, said
    path.write_text(TASK.replace("use_spot", "use_spots"))
    assert checked(tools / "python", "-c", program, path, env=env)[0] != 0
