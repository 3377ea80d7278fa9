"""What `fagen bench --json` prints, and the reports that are read back from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fagen.bench import decode, speed
from fagen.bench.compile import CompileReport, Timing
from fagen.bench.decode import DecodeReport
from fagen.bench.results import Rates, Report
from fagen.bench.speed import SpeedReport
from fagen.bench.variants import VariantsReport
from fagen.errors import SpecError

_MACHINE = ("card", "arch", "torch", "driver")


@dataclass(frozen=True)
class Run:
    """One measurement: what was found, on which day ("2026-01-02"), and by which command."""

    report: CompileReport | SpeedReport | DecodeReport | VariantsReport
    date: str
    command: str

    @property
    def measured(self) -> str:
        """The flag that measures this, without its dashes."""
        if isinstance(self.report, SpeedReport):
            return self.report.direction
        if isinstance(self.report, DecodeReport):
            return "decode"
        return "compile" if isinstance(self.report, CompileReport) else "variants"


def of(run: Run) -> dict[str, Any]:
    """A run as the document that `--json` prints. Numbers that are not finite are still floats."""
    report = run.report
    document: dict[str, Any] = {"measured": run.measured, "command": run.command, "date": run.date}
    if isinstance(report, Report):
        document |= asdict(report.machine)
    if isinstance(report, SpeedReport):
        document |= {"matmul_tflops": report.matmul, "rows": [_speed_row(result) for result in report.results]}
        return document | {"host_us": report.host_us, "host_failure": report.host_failure}
    if isinstance(report, DecodeReport):
        return document | {"rows": [_decode_row(result) for result in report.results], "smem_bytes": report.smem_bytes}
    if isinstance(report, CompileReport):
        document |= {"cores": report.cores, "compiler": report.compiler, "host_compiler": report.host_compiler}
        document["empty_file"] = {
            "name": report.empty_name,
            "seconds": report.empty_median,
            "all_seconds": report.empty,
        }
        return document | {"rows": [_timing(timing) for timing in report.timings]}
    document |= {name: getattr(report, name) for name in ("device", "arch", "torch", "compiler")}
    rows = [
        {
            "name": one.row.name,
            "spec": one.row.spec.model_dump(mode="json"),
            "kernels": [asdict(kernel) for kernel in one.kernels],
            "errors": [asdict(error) for error in one.errors],
            "failure": one.failure,
            "passed": one.passed,
        }
        for one in report.variants
    ]
    return document | {"rows": rows}


def read(path: Path) -> list[Run]:
    """The runs of a file that `fagen bench --json` wrote. Raises SpecError for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"--from {str(path)!r}: {(error.strerror or str(error)).lower()}") from None
    except ValueError:
        raise SpecError(f"--from {str(path)!r} is not JSON: save what fagen bench --json prints") from None
    try:
        return [_run(document) for document in found.get("documents", [found])]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except KeyError as error:
        problem = f"it has no field {error}"
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        problem = str(error)
    raise SpecError(f"--from {str(path)!r} is not what this version of fagen bench --json prints: {problem}")


def _run(document: Mapping[str, Any]) -> Run:
    types: dict[str, tuple[Any, Any]] = {
        "compile": (CompileReport, _compile_fields),
        "forward": (SpeedReport, _speed_fields),
        "backward": (SpeedReport, _speed_fields),
        "decode": (DecodeReport, _decode_fields),
        "variants": (VariantsReport, _variants_fields),
    }
    measured = document["measured"]
    if measured not in types:
        raise ValueError(f"measured is {measured!r}, none of {', '.join(types)}")
    if not document["rows"]:
        raise ValueError("it has no rows")
    report_type, fields = types[measured]
    strings = TypeAdapter(tuple[str, str]).validate_python((document["date"], document["command"]))
    run = Run(TypeAdapter(report_type).validate_python(fields(document)), *strings)
    of(run)  # whatever follows from the fields can be computed
    return run


def _speed_row(result: speed.Result) -> dict[str, Any]:
    row = result.row
    return {
        "name": row.name,
        "spec": row.spec.model_dump(mode="json"),
        "batch": row.batch,
        "heads": row.heads,
        "seqlen": row.seqlen,
        "flop": row.flop,
        **_compared(result, "tflops"),
        "matmul_tflops": result.matmul,
        "share_of_matmul": result.share_of_matmul,
    }


def _speed_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    results = []
    for row in document["rows"]:
        spec = row["spec"]
        problem = {name: spec[name] for name in ("head_dim", "causal", "softcap", "backward")}
        problem |= {"seqlen": row["seqlen"], "tokens": row["batch"] * row["seqlen"]}
        problem["width"] = row["heads"] * spec["head_dim"]
        results.append(_rates(row, problem, "tflops") | {"matmul": row["matmul_tflops"]})
    host = {name: document[name] for name in ("host_us", "host_failure")}
    return {"machine": _machine(document), "results": results, **host}


def _decode_row(result: decode.Result) -> dict[str, Any]:
    row = result.row
    return {
        "name": row.name,
        "spec": row.spec.model_dump(mode="json"),
        "batch": row.batch,
        "heads": row.heads,
        "heads_k": row.heads_k,
        "keys": row.keys,
        "bytes": row.bytes,
        "us": {name: result.microseconds(name) for name in result.rates if name != decode.COPY},
        **_compared(result, "tbps"),
        "share_of_copy": result.share_of_copy,
    }


def _decode_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    names = ("batch", "keys", "heads", "heads_k")
    results = [_rates(row, {name: row[name] for name in names}, "tbps") for row in document["rows"]]
    return {"machine": _machine(document), "results": results, "smem_bytes": document["smem_bytes"]}


def _compared(result: Rates, unit: str) -> dict[str, Any]:
    """What a row of every document on speeds has."""
    reference = result.row.reference
    return {
        unit: result.rates,
        "to_cudnn": {name: result.to_cudnn(name) for name in result.rates},
        "failures": result.failures,
        "reference": reference and asdict(reference),
        f"fa3_scaled_{unit}": result.fa3_scaled,
        "fa3_scaled_ratio": result.fa3_scaled_ratio,
        f"goal_{unit}": result.goal,
        "goal_ratio": result.goal_ratio,
        "difference": result.difference,
        "compared_with": result.compared_with,
    }


def _rates(row: Mapping[str, Any], problem: Mapping[str, Any], unit: str) -> dict[str, Any]:
    """The fields of Rates; what follows from them is not read."""
    same = {name: row[name] for name in ("difference", "compared_with", "failures")}
    return {"row": problem, "rates": row[unit], **same}


def _machine(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in _MACHINE}


def _timing(timing: Timing) -> dict[str, Any]:
    job = timing.job
    return {
        "name": job.name,
        "kind": job.kind,
        "spec": job.spec and job.spec.model_dump(mode="json"),
        "arch": job.arch,
        "emulated": job.emulate,
        "warm": job.warm,
        "seconds": timing.median,
        "all_seconds": timing.seconds,
        "ratio": timing.ratio,
        "goal_seconds": job.goal,
        "goal_ratio": job.goal_ratio,
        "reached": timing.reached,
    }


def _compile_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    timings = []
    for row in document["rows"]:
        job = {name: row[name] for name in ("name", "kind", "spec", "arch", "warm", "goal_ratio")}
        job |= {"emulate": row["emulated"], "goal": row["goal_seconds"]}
        timings.append({"job": job, "seconds": row["all_seconds"], "ratio": row["ratio"]})
    empty = document["empty_file"]
    same = {name: document[name] for name in ("compiler", "host_compiler", "cores")}
    return {"empty_name": empty["name"], "empty": empty["all_seconds"], "timings": timings, **same}


def _variants_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    names = ("kernels", "errors", "failure")
    variants = [{"row": {"spec": row["spec"]}} | {name: row[name] for name in names} for row in document["rows"]]
    return {name: document[name] for name in ("device", "arch", "torch", "compiler")} | {"variants": variants}
