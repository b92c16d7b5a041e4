//! A program that fails as a whole is run op by op: what depends on the op at fault fails, and nothing else.

use std::sync::atomic::{AtomicUsize, Ordering, Ordering::Relaxed};

use common::{Returned, Rig, Tensor, options};
use oxitorch_engine::{ArgRef, CacheOptions, ErrorKind, Mode, Options, Reason};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

const TANH: &str = "tanh(Tensor self) -> Tensor";
const EXP: &str = "exp(Tensor self) -> Tensor";
const NLL: &str = "nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index) -> (Tensor output, Tensor total_weight)";

/// A device whose compiler has no code for `tanh` and `exponential`.
fn broken() -> Rig {
    let rig = Rig::new();
    rig.fake.refuse("stablehlo.tanh");
    rig.fake.refuse("stablehlo.exponential");
    rig
}

fn isolations(rig: &Rig) -> u64 {
    rig.metrics().isolations.load(Relaxed)
}

fn message(rig: &Rig, tensor: &Tensor) -> String {
    rig.read(tensor).unwrap_err().message.to_string()
}

#[test]
fn only_what_depends_on_the_op_fails() {
    let rig = broken();
    let x = rig.floats();
    let before = rig.at(1).neg(&x);
    let tanh = rig.at(2).one(TANH, &[x.arg()]);
    let after = rig.at(3).add(&before, &x);
    let dependent = rig.at(4).add(&tanh, &after);
    assert_eq!(rig.at(5).read(&after).unwrap(), [1; 16]);
    assert!(rig.read(&before).is_ok() && rig.read(&x).is_ok());
    for tensor in [&tanh, &dependent] {
        let message = message(&rig, tensor);
        assert!(message.starts_with("tanh: compilation failed (INTERNAL): no code"), "{message}");
        assert!(message.ends_with("\n  called at script.py:2"), "{message}");
    }
    assert_eq!(isolations(&rig), 1);
    rig.sync().unwrap(); // the failure was seen
}

#[test]
fn two_ops_at_fault_are_two_errors() {
    let rig = broken();
    let x = rig.floats();
    let tanh = rig.at(2).one(TANH, &[x.arg()]);
    let exp = rig.at(3).one(EXP, &[x.arg()]);
    let sum = rig.at(4).add(&x, &x);
    assert!(rig.read(&sum).is_ok());
    let (exp, tanh) = (message(&rig, &exp), message(&rig, &tanh));
    assert!(exp.starts_with("exp: ") && exp.ends_with("script.py:3"), "{exp}");
    assert!(tanh.starts_with("tanh: ") && tanh.ends_with("script.py:2"), "{tanh}");
}

#[test]
fn a_later_window_fails_with_the_line_of_the_first() {
    let rig = broken();
    let x = rig.floats();
    let tanh = rig.at(2).one(TANH, &[x.arg()]);
    rig.cut(Reason::Step);
    let (later, other) = (rig.at(8).neg(&tanh), rig.at(9).relu(&x));
    assert!(rig.at(10).read(&other).is_ok());
    assert!(message(&rig, &later).ends_with("\n  called at script.py:2"));
}

#[test]
fn who_waits_gets_the_first_failure_once() {
    let rig = broken();
    let x = rig.floats();
    let kept = [rig.at(2).one(TANH, &[x.arg()]), rig.at(3).one(EXP, &[x.arg()])];
    let e = rig.at(4).sync().unwrap_err();
    assert!(e.message.starts_with("tanh: ") && e.message.ends_with("script.py:2"), "{e}");
    rig.sync().unwrap();
    drop(kept);
    rig.sync().unwrap();
    assert_eq!(rig.bytes(), 16, "only `x` is there");
}

#[test]
fn what_works_op_by_op_is_told_once() {
    static TOLD: AtomicUsize = AtomicUsize::new(0);
    let warn = |text: &str| {
        assert!(text.contains("run one by one") && text.contains("out of luck"), "{text}");
        TOLD.fetch_add(1, Ordering::SeqCst);
    };
    let cache = CacheOptions { warn, ..CacheOptions::default() };
    let rig = Rig::with(FakePlugin::new(), Platform::Tpu, &Options { cache, ..options() });
    let x = rig.floats();
    for round in 0..3 {
        rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "out of luck");
        let y = rig.relu(&rig.neg(&x));
        assert_eq!(rig.read(&y).unwrap(), [1; 16], "{round}");
    }
    assert_eq!((isolations(&rig), TOLD.load(Ordering::SeqCst)), (3, 1));
    // One launch that failed and one for each op.
    assert_eq!(rig.fake.calls("PJRT_LoadedExecutable_Execute"), 9);
}

#[test]
fn an_op_alone_is_not_run_again() {
    for mode in [Mode::Fused, Mode::Strict] {
        let rig = Rig::new();
        rig.mode(mode);
        let x = rig.floats();
        rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "out of luck");
        let y = rig.at(3).neg(&x);
        let message = message(&rig, &y);
        assert!(message.contains("out of luck") && message.ends_with("script.py:3"), "{message}");
        assert_eq!((isolations(&rig), rig.fake.calls("PJRT_LoadedExecutable_Execute")), (0, 1));
    }
}

#[test]
fn offsets_reach_ops_that_run_alone() {
    let rig = Rig::new();
    let x = rig.uploaded(DType::F32, &[64], 1);
    let round = |i: i64| rig.relu(&rig.neg(&x.narrow(i, 4)));
    for i in 0..4 {
        rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "out of luck");
        assert_eq!(rig.read(&round(i)).unwrap().len(), 16, "{i}");
    }
    assert_eq!(isolations(&rig), 4);
}

#[test]
fn what_does_not_fit_is_not_tried_op_by_op_in_long_windows() {
    for (ops, isolated) in [(10, 1), (70, 0)] {
        let rig = Rig::new();
        let x = rig.uploaded(DType::F32, &[1024], 1);
        rig.sync().unwrap();
        let memory = rig.stream().memory();
        let room =
            |bytes: u64| memory.set_fraction((memory.bytes().current + bytes) as f64 / memory.total() as f64);
        room(8 << 10);
        let kept: Vec<Tensor> = (0..ops).map(|i| rig.at(i).neg(&x)).collect();
        rig.cut(Reason::Wait);
        let kinds: Vec<_> = kept.iter().map(|t| rig.read(t).map_err(|e| e.kind)).collect();
        assert_eq!(kinds[9].clone().unwrap_err(), ErrorKind::OutOfMemory);
        assert_eq!(kinds[0].is_ok(), isolated == 1, "{ops}");
        assert_eq!(isolations(&rig), isolated, "{ops}");
        assert!(memory.ooms() > 0);
        memory.set_fraction(1.0);
        drop(kept);
        let _ = rig.sync();
        assert!(rig.read(&rig.neg(&x)).is_ok());
    }
}

/// A loss whose targets the program checks. The fake's result of the check is what the first argument of four bytes
/// holds: -1, "no check has failed", for `sound` scores, and else 0, the first.
fn loss(rig: &Rig, sound: bool) -> Tensor {
    let sizes: &[i64] = if sound { &[1, 1] } else { &[1, 2] };
    let scores = rig.uploaded(DType::F32, sizes, 0xff);
    let target = rig.uploaded(DType::S64, &[1], 0);
    let mean = 1;
    let args = [scores.arg(), target.arg(), ArgRef::None, common::int(mean), common::int(-100)];
    match rig.dispatch(NLL, &args).unwrap().swap_remove(0) {
        Returned::New(loss) => loss,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_check_that_fails_is_raised_where_somebody_waits() {
    let rig = Rig::new();
    let x = rig.floats();
    assert!(rig.read(&loss(&rig, true)).is_ok());
    let y = rig.at(2).neg(&x);
    let bad = rig.at(3).uploaded(DType::F32, &[4], 1);
    let wrong = loss(&rig, false);
    let e = rig.at(5).read(&wrong).unwrap_err();
    assert_eq!(e.kind, ErrorKind::Index);
    assert!(e.message.contains("Target is out of bounds.") && e.message.ends_with("script.py:3"), "{e}");
    rig.sync().unwrap();
    // It says nothing about other values.
    assert!(rig.read(&y).is_ok() && rig.read(&bad).is_ok());
    let wrong = loss(rig.at(6), false);
    let e = rig.at(7).sync().unwrap_err();
    assert!(e.message.ends_with("script.py:6"), "{e}");
    rig.sync().unwrap();
    drop(wrong);
}

#[test]
fn checks_are_looked_at_op_by_op_too() {
    let rig = Rig::new();
    let x = rig.floats();
    rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "out of luck");
    let (y, wrong) = (rig.at(2).neg(&x), loss(rig.at(3), false));
    let e = rig.at(4).sync().unwrap_err();
    assert!(e.kind == ErrorKind::Index && e.message.ends_with("script.py:3"), "{e}");
    assert_eq!(isolations(&rig), 1);
    assert!(rig.read(&y).is_ok());
    drop(wrong);
}
