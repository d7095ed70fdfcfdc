;; Leaves its input, as it came, as an artifact called input.json.
;;
;;   forge-vmm run --sign-with signer.pem --input '{"a":1}' --artifacts DIR \
;;       examples/programs/artifact.wat
(module
  (import "forge" "input_len" (func $input_len (result i32)))
  (import "forge" "input_read" (func $input_read (param i32 i32 i32) (result i32)))
  (import "forge" "artifact" (func $artifact (param i32 i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "input.json")
  (data (i32.const 16) "application/json")

  (func (export "forge_run") (result i32)
    (local $length i32)
    ;; What does not fit into the page is left out.
    (local.set $length
      (call $input_read (i32.const 1024) (i32.const 0) (i32.const 64512)))
    (drop (call $artifact
      (i32.const 0) (i32.const 10)      ;; name
      (i32.const 16) (i32.const 16)     ;; media type
      (i32.const 1024) (local.get $length)))
    ;; Fails if something was left out.
    (i32.ne (local.get $length) (call $input_len))))
