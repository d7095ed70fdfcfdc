#![allow(missing_docs, clippy::unwrap_used)]
use forge_protocol::guest::Start;
use forge_protocol::signature::SignerKey;
use forge_protocol::worker::Job;
#[test]
fn boots() {
    let wat = r#"(module (import "forge" "output" (func $o (param i32 i32) (result i32)))
      (memory (export "memory") 1) (data (i32.const 0) "hello from the guest\n")
      (func (export "forge_run") (result i32) (drop (call $o (i32.const 0) (i32.const 21))) (i32.const 0)))"#;
    let key = SignerKey::from_secret(&[7; 32]);
    let program = key.sign(&wat::parse_str(wat).unwrap()).unwrap();
    let job = Job {
        start: Start {
            run_id: forge_protocol::RunId([1; 16]),
            limits: Default::default(),
            seed: [0; 32],
            start_unix_ns: 0,
            granted: vec![],
        },
        trust: vec![key.trust_key().to_bytes()],
        program,
        input: b"{}".to_vec(),
        deadline_ns: 5_000_000_000,
        brokered: false,
    };
    for _ in 0..20 {
        let report = forge_vmm::worker::serve(&job, None);
        eprintln!(
            "{:?} out={:?} exits={} {:?}",
            report.fate,
            String::from_utf8_lossy(&report.output),
            report.vm_exits,
            report.timing
        );
    }
}
