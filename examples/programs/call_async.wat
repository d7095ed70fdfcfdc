;; Starts three calls at once and prints the answers in the order in which
;; they settle. `call_async` takes the tool by name, so the grant is all that
;; decides whether the call is allowed: nothing is imported for it.
;;
;;   forge-vmm run --sign-with signer.pem --mcp-config examples/mcp.json \
;;       --allow inventory.get_stock examples/programs/call_async.wat
(module
  (import "forge" "call_async" (func $call_async (param i32 i32 i32 i32) (result i32)))
  (import "forge" "wait_any" (func $wait_any (result i32)))
  (import "forge" "wait" (func $wait (param i32) (result i32)))
  (import "forge" "resp_read" (func $resp_read (param i32 i32 i32) (result i32)))
  (import "forge" "output" (func $output (param i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "inventory.get_stock")
  (data (i32.const 32) "{\"part_id\":\"P-1001\"}")
  (data (i32.const 64) "{\"part_id\":\"P-2001\"}")
  (data (i32.const 96) "{\"part_id\":\"P-3001\"}")
  (data (i32.const 128) "\n")

  (func $start (param $request i32) (result i32)
    (call $call_async (i32.const 0) (i32.const 19) (local.get $request) (i32.const 20)))

  (func (export "forge_run") (result i32)
    (local $left i32)
    (local $length i32)
    ;; A handle is 0 or more, a refusal is below 0.
    (if (i32.lt_s (call $start (i32.const 32)) (i32.const 0)) (then (return (i32.const 1))))
    (if (i32.lt_s (call $start (i32.const 64)) (i32.const 0)) (then (return (i32.const 1))))
    (if (i32.lt_s (call $start (i32.const 96)) (i32.const 0)) (then (return (i32.const 1))))
    (local.set $left (i32.const 3))
    (loop $next
      ;; `wait_any` tells which call settled first, `wait` takes its answer.
      (local.set $length (call $wait (call $wait_any)))
      (if (i32.lt_s (local.get $length) (i32.const 0)) (then (return (i32.const 1))))
      (drop (call $output
        (i32.const 1024)
        (call $resp_read (i32.const 1024) (i32.const 0) (i32.const 64512))))
      (drop (call $output (i32.const 128) (i32.const 1)))
      (br_if $next (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
    (i32.const 0)))
