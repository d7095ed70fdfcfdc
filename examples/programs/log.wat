;; Says one thing on its output and another in its log.
;;
;;   forge-vmm run --sign-with signer.pem examples/programs/log.wat
(module
  (import "forge" "output" (func $output (param i32 i32) (result i32)))
  (import "forge" "log" (func $log (param i32 i32 i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "hello from ring 3 of a machine of my own\n")
  (data (i32.const 64) "nothing to report")

  (func (export "forge_run") (result i32)
    (drop (call $output (i32.const 0) (i32.const 41)))
    (call $log (i32.const 2) (i32.const 64) (i32.const 17)) ;; 2 is info
    (i32.const 0)))                                         ;; 0 is success
