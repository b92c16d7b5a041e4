//! The plugin's large blocks of memory are kept for its next program.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod common;

use common::{client, compile, f32s, plugin, put};
use oxitorch_pjrt::{ExecuteArgs, release_blocks};

const N: i64 = 64 << 18; // 64 MiB

/// Pages that this process touched for the first time.
fn faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the system fills the struct in, all of whose fields may be zero.
    unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init().ru_minflt
    }
}

#[test]
fn the_next_program_has_the_memory_of_the_last() {
    let client = client(1);
    let code = format!(
        "module @m {{ func.func @main(%a: tensor<{N}xf32>) -> tensor<{N}xf32> {{
           %b = stablehlo.add %a, %a : tensor<{N}xf32>
           return %b : tensor<{N}xf32> }} }}"
    );
    let double = compile(&client, &code, &[f32s(&[N])]);
    let a = put(&client, 0, &vec![1.0; N as usize], &[N]);
    let run = || {
        let out = double.execute(&[&a], &ExecuteArgs { device: None, non_donatable: &[] }).unwrap();
        out[0].wait().unwrap();
        let bytes = out[0].bytes().unwrap();
        assert_eq!(bytes[..4], 2f32.to_ne_bytes());
        assert_eq!(bytes[bytes.len() - 4..], 2f32.to_ne_bytes());
    };
    let touched = |rounds: usize| {
        let before = faults();
        (0..rounds).for_each(|_| run());
        faults() - before
    };
    const PAGES: i64 = N * 4 / 4096;
    touched(2);
    assert!(touched(4) >= 4 * PAGES, "malloc keeps such blocks by itself: this file is of no use any more");
    assert!(plugin().keep_blocks());
    // A thread of the plugin may free a block behind the next launch, which then makes a second one.
    assert!((0..50).any(|_| touched(4) < PAGES / 4), "no four rounds without page faults");
    let anew = |_| {
        let released = release_blocks();
        touched(1) >= PAGES && released >= N as usize * 4
    };
    assert!((0..50).any(anew), "what was released is in use");
}
