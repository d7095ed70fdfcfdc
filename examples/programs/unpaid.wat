;; Prints the invoices that nobody has paid. It calls the tool by name, so the
;; grant is all that decides whether it may: granted by intent, it works.
;;
;;   forge-vmm run --sign-with signer.pem --mcp-config examples/surface.mcp.json \
;;       --intent "Which invoices are unpaid?" examples/programs/unpaid.wat
(module
  (import "forge" "call_async" (func $call_async (param i32 i32 i32 i32) (result i32)))
  (import "forge" "wait" (func $wait (param i32) (result i32)))
  (import "forge" "resp_read" (func $resp_read (param i32 i32 i32) (result i32)))
  (import "forge" "output" (func $output (param i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "billing.list_invoices")
  (data (i32.const 32) "{\"status\":\"unpaid\"}")

  (func (export "forge_run") (result i32)
    (local $handle i32)
    (local.set $handle
      (call $call_async (i32.const 0) (i32.const 21) (i32.const 32) (i32.const 19)))
    ;; A handle is 0 or more, a refusal is below 0.
    (if (i32.lt_s (local.get $handle) (i32.const 0)) (then (return (i32.const 1))))
    (if (i32.lt_s (call $wait (local.get $handle)) (i32.const 0)) (then (return (i32.const 1))))
    (drop (call $output
      (i32.const 1024)
      (call $resp_read (i32.const 1024) (i32.const 0) (i32.const 64512))))
    (i32.const 0)))
