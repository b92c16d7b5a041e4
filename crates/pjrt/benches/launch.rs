//! Host cost of launching and copying, on the CPU plugin: `cargo bench -p oxitorch-pjrt`.
//! Each line is the least and the median time of one call, in microseconds.
#![allow(clippy::print_stdout, reason = "it prints a table")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{ADD, client, compile, f32s, put};
use oxitorch_pjrt::{Buffer, ElementType, ExecuteArgs};

const HOW: ExecuteArgs<'static> = ExecuteArgs { device: None, non_donatable: &[] };

fn time(name: &str, calls: usize, mut f: impl FnMut()) {
    let mut us: Vec<f64> = (0..calls)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_nanos() as f64 / 1e3
        })
        .collect();
    us.sort_by(f64::total_cmp);
    println!("{name:45} {:8.2} {:8.2}", us[0], us[calls / 2]);
}

/// A program of `n` arguments that returns each of them plus one.
fn wide(n: usize) -> String {
    let (ty, all) =
        ("tensor<4xf32>", |f: &dyn Fn(usize) -> String| (0..n).map(f).collect::<Vec<_>>().join(", "));
    let body: String = (0..n).map(|i| format!("%r{i} = stablehlo.add %a{i}, %a{i} : {ty}\n")).collect();
    format!(
        "module {{ func.func @main({}) -> ({}) {{ {body} return {} : {} }} }}",
        all(&|i| format!("%a{i}: {ty}")),
        all(&|_| ty.into()),
        all(&|i| format!("%r{i}")),
        all(&|_| ty.into())
    )
}

fn main() {
    let client = client(1);
    let device = &client.devices()[0];
    let add = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    let (a, b) = (put(&client, 0, &[1.0; 4], &[4]), put(&client, 0, &[1.0; 4], &[4]));
    println!("{:45} {:>8} {:>8}", "", "least", "median");
    time("add f32[4]", 100_000, || drop(add.execute(&[&a, &b], &HOW).unwrap()));
    time("add f32[4], waiting", 100_000, || add.execute(&[&a, &b], &HOW).unwrap()[0].wait().unwrap());
    let mut out = Vec::new();
    time("add f32[4], into a kept vector", 100_000, || {
        out.clear();
        add.execute_into(&[&a, &b], &HOW, &mut out).unwrap();
    });
    time("1000 adds in a chain, then a wait", 100, || {
        let mut x = add.execute(&[&a, &b], &HOW).unwrap().remove(0);
        for _ in 1..1000 {
            x = add.execute(&[&x, &b], &HOW).unwrap().remove(0);
        }
        x.wait().unwrap();
    });
    let hundred: Vec<Buffer> = (0..100).map(|_| put(&client, 0, &[1.0; 4], &[4])).collect();
    let refs: Vec<&Buffer> = hundred.iter().collect();
    let program = compile(&client, &wide(100), &vec![f32s(&[4]); 100]);
    time("100 arguments and results", 2_000, || drop(program.execute(&refs, &HOW).unwrap()));
    let bytes = [0; 16];
    time("host to device, 16 bytes", 100_000, || {
        drop(client.buffer_from_host(&bytes, ElementType::F32, &[4], device).unwrap());
    });
    let mut back = [0; 16];
    time("device to host, 16 bytes", 100_000, || a.to_host(&mut back).unwrap());
    let four_mb = vec![0; 4 << 20];
    time("host to device, 4 MB", 200, || {
        drop(client.buffer_from_host(&four_mb, ElementType::U8, &[4 << 20], device).unwrap());
    });
}
