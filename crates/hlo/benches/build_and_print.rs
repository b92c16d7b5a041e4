//! How long building and printing take: `cargo bench -p oxitorch-hlo`.
#![allow(clippy::print_stdout, reason = "a benchmark reports on stdout")]

use std::hint::black_box;
use std::time::Instant;

use oxitorch_hlo::{Builder, DType, Module, TensorType};

fn one_op() -> Module {
    let b = Builder::new();
    let x = b.param(TensorType::new(DType::F32, vec![4]));
    let y = b.param(TensorType::new(DType::F32, vec![4]));
    let sum = b.add(x, y);
    b.finish(&[sum]).expect("the types agree")
}

/// Some 2,000 ops in the proportions of a training step: elementwise, broadcasts, reductions, dots.
fn many_ops() -> Module {
    let b = Builder::new();
    let x = b.param(TensorType::new(DType::F32, vec![64, 64]));
    let mut v = x;
    for _ in 0..200 {
        let product = b.matmul(v, x, Default::default(), None);
        let mean = b.reduce_sum(product, &[1]);
        let centred = b.subtract(product, b.broadcast_in_dim(mean, &[64, 64], &[0]));
        let scaled = b.multiply(centred, b.full(b.scalar_f64(DType::F32, 0.125), &[64, 64]));
        let gate = b.logistic(b.negate(b.transpose(scaled, &[1, 0])));
        v = b.maximum(b.add(b.multiply(scaled, gate), x), b.zeros_like(x));
    }
    b.finish(&[v]).expect("the types agree")
}

/// The fastest of many runs, in microseconds.
fn fastest_us<T>(runs: usize, mut f: impl FnMut() -> T) -> f64 {
    let once = |f: &mut dyn FnMut() -> T| {
        let start = Instant::now();
        black_box(f());
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..runs).map(|_| once(&mut f)).fold(f64::INFINITY, f64::min)
}

fn main() {
    report("one op", 2000, one_op);
    report("many ops", 100, many_ops);
}

fn report(name: &str, runs: usize, make: fn() -> Module) {
    let module = make();
    let build = fastest_us(runs, make);
    let print = fastest_us(runs, || module.to_text());
    let bytes = module.to_text().len();
    println!(
        "{name}: build {build:.2} us, print {print:.2} us, {} ops, {bytes} bytes",
        module.live_op_count()
    );
}
