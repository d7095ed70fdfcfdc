//! `forge-vmm bench` as a command: what it prints, draws and compares, and
//! what it refuses. No time it measures is asserted on.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;

use std::fs;
use std::process::{ExitCode, Output};

use desk::Desk;
use serde_json::Value;

fn main() -> ExitCode {
    support::main(
        claims![
            every_figure_comes_with_host_commit_and_sample_count,
            a_group_brings_the_floors_its_ratios_need,
            a_picture_has_a_row_for_each_case,
            a_bench_is_compared_with_an_earlier_one,
            execution_in_the_guest_is_measured_beside_the_host,
            a_tool_call_is_measured_for_each_effect_and_a_write_beside_the_disk,
            each_door_is_measured_beside_a_run_without_one,
            a_tenant_is_measured_beside_another_that_floods_the_service,
        ],
        claims![
            whether_a_call_is_allowed_is_measured_without_a_vm,
            what_is_not_there_exits_2_and_names_what_is,
            a_file_that_is_no_bench_is_refused_before_anything_is_measured,
            no_samples_are_no_bench,
        ],
    )
}

fn bench(arguments: &[&str]) -> Output {
    Desk::new().forge(&[&["bench"], arguments].concat())
}

fn json(arguments: &[&str]) -> Value {
    let output = bench(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn names(results: &Value) -> Vec<&str> {
    results["results"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect()
}

fn every_figure_comes_with_host_commit_and_sample_count() {
    let results = json(&["boot", "--runs", "3"]);
    for field in ["cpu", "kernel", "kvm"] {
        assert!(!results["host"][field].as_str().unwrap().is_empty(), "{field}");
    }
    assert!(results["host"]["threads"].as_u64().unwrap() > 0);
    assert!(!results["commit"].as_str().unwrap().is_empty());
    for result in results["results"].as_array().unwrap() {
        assert_eq!((&result["n"], &result["unit"]), (&3.into(), &"us".into()));
        for field in ["p50", "p90", "max"] {
            assert!(result[field].as_f64().unwrap() > 0.0, "{field}");
        }
        assert!(result["p99"].is_null(), "of three samples it would be the greatest");
    }
    let table = text(&bench(&["boot", "--runs", "3"]).stdout);
    for said in [&results["host"]["kernel"], &results["host"]["kvm"], &results["commit"]] {
        assert!(table.contains(said.as_str().unwrap()), "{table}");
    }
}

fn a_group_brings_the_floors_its_ratios_need() {
    let results = json(&["boot", "--runs", "1"]);
    assert_eq!(names(&results), ["floor_kvm", "boot"]);
    let boot = &results["results"][1];
    assert_eq!(boot["ratio_of"], "floor_kvm");
    let ratio = boot["p50"].as_f64().unwrap() / results["results"][0]["p50"].as_f64().unwrap();
    assert!((boot["ratio"].as_f64().unwrap() - ratio).abs() < 1e-6);
}

fn a_picture_has_a_row_for_each_case() {
    let desk = Desk::new();
    let plots = desk.path("not/there/yet");
    let output = bench(&["boot", "--runs", "3", "--plot", plots.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let svg = fs::read_to_string(plots.join("latency.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains(">floor_kvm<") && svg.contains(">boot<"));
}

fn a_bench_is_compared_with_an_earlier_one() {
    let desk = Desk::new();
    let mut old = json(&["floor_verify", "--runs", "3"]);
    // Then it took a thousandth, on a quiet host.
    let then = old["results"][0]["p50"].as_f64().unwrap() / 1000.0;
    old["results"][0]["p50"] = then.into();
    old["results"][0]["interval"] = vec![then, then].into();
    old["disturbed"] = 0.0.into();
    let path = desk.write("old.json", old.to_string().as_bytes());
    let new = json(&["floor_verify", "--runs", "3", "--compare", &path]);
    let compared = &new["compared"][0];
    // Read from JSON, a number may be off by its last bit.
    assert!((compared["old"].as_f64().unwrap() / then - 1.0).abs() < 1e-9, "{compared}");
    assert_eq!(compared["new"], new["results"][0]["p50"]);
    // This host may be busy.
    let verdict = compared["verdict"].as_str().unwrap();
    assert!(["host_slower", "disturbed"].contains(&verdict), "{verdict}");
    let printed = text(&bench(&["floor_verify", "--runs", "3", "--compare", &path]).stdout);
    assert!(printed.contains("verdict") && printed.contains("\nold: "), "{printed}");
}

fn execution_in_the_guest_is_measured_beside_the_host() {
    let results = json(&["exec", "--runs", "2"]);
    assert_eq!(names(&results), ["exec_ratio"]);
    let exec = &results["results"][0];
    assert_eq!((&exec["unit"], &exec["n"]), (&"x".into(), &2.into()));
    let note = exec["note"].as_str().unwrap();
    assert!(note.contains("guest ") && note.contains("host "), "{note}");
}

fn a_tool_call_is_measured_for_each_effect_and_a_write_beside_the_disk() {
    executables::folder();
    let results = json(&["toolcall", "--runs", "2"]);
    let cases = ["toolcall_null", "toolcall_read", "toolcall_write", "authorise"];
    let floors = ["floor_exit", "floor_socket", "floor_fsync"];
    assert_eq!(names(&results), [&floors[..], &cases].concat());
    for result in results["results"].as_array().unwrap() {
        assert_eq!((&result["unit"], &result["n"]), (&"us".into(), &2.into()), "{result}");
        // A call is a difference of two runs, and on a busy host it may be none.
        let is_difference = result["name"].as_str().unwrap().starts_with("toolcall_");
        let p50 = result["p50"].as_f64().unwrap();
        assert!(p50 > 0.0 || (is_difference && p50 == 0.0), "{result}");
    }
    let of = |name: &str| {
        let all = results["results"].as_array().unwrap();
        all.iter().find(|result| result["name"] == name).unwrap()
    };
    assert_eq!(of("toolcall_read")["ratio_of"], "floor_exit + 1.5 floor_socket");
    let write = of("toolcall_write");
    assert_eq!(write["ratio_of"], "floor_exit + 1.5 floor_socket + floor_fsync");
    let p50 = |name: &str| of(name)["p50"].as_f64().unwrap();
    let floor = p50("floor_exit") + 1.5 * p50("floor_socket") + p50("floor_fsync");
    let ratio = write["ratio"].as_f64().unwrap();
    assert!((ratio - p50("toolcall_write") / floor).abs() < 1e-6, "{write}");
}

fn each_door_is_measured_beside_a_run_without_one() {
    executables::folder();
    let results = json(&["doors", "--runs", "2"]);
    assert_eq!(
        names(&results),
        ["floor_socket", "floor_door", "door_none", "door_vsock", "door_http", "door_mcp"]
    );
    for result in &results["results"].as_array().unwrap()[3..] {
        assert_eq!((&result["unit"], &result["n"]), (&"us".into(), &2.into()), "{result}");
        assert_eq!(result["ratio_of"], "2 floor_socket");
    }
}

fn a_tenant_is_measured_beside_another_that_floods_the_service() {
    executables::folder();
    let results = json(&["overload_p50", "--runs", "1"]);
    assert_eq!(names(&results), ["overload_p50"]);
    let overload = &results["results"][0];
    assert_eq!((&overload["unit"], &overload["n"]), (&"x".into(), &1.into()));
    assert!(overload["p50"].as_f64().unwrap() > 0.0, "{overload}");
    let note = overload["note"].as_str().unwrap();
    assert!(note.contains("admitted") && note.contains("refused"), "{note}");
}

fn whether_a_call_is_allowed_is_measured_without_a_vm() {
    executables::folder();
    let results = json(&["authorise", "--runs", "3"]);
    assert_eq!(names(&results), ["authorise"]);
    let authorise = &results["results"][0];
    assert_eq!((&authorise["unit"], &authorise["n"]), (&"us".into(), &3.into()));
    assert!(authorise["p50"].as_f64().unwrap() > 0.0, "{authorise}");
}

fn what_is_not_there_exits_2_and_names_what_is() {
    let output = bench(&["bot"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    for name in ["\"bot\"", "all", "boot", "floors", "exec_ratio"] {
        assert!(said.contains(name), "{said}");
    }
}

fn a_file_that_is_no_bench_is_refused_before_anything_is_measured() {
    let desk = Desk::new();
    let path = desk.write("report.json", br#"{"status": "ok"}"#);
    let output = bench(&["--compare", &path]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let said = text(&output.stderr);
    assert!(said.contains("report.json: this is no output of `forge-vmm bench --json`"), "{said}");
}

fn no_samples_are_no_bench() {
    let output = bench(&["--runs", "0"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("at least 1"));
}
