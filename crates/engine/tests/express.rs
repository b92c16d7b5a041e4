//! The short way of a call: it records what the long way records, and leaves to that what is out of the ordinary.

use std::sync::atomic::Ordering::Relaxed;

use common::{ADD, MUL, NEG, RELU_, Returned, Rig, Tensor, int, wrapped};
use oxitorch_aten::args::Number;
use oxitorch_engine::{ArgRef, Express, Mode, Plain, Refusal};
use oxitorch_hlo::DType;
use oxitorch_pjrt::OptionValue;

mod common;

const ROLL: &str = "roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor";
const SUM: &str =
    "sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor";
const SELECT: &str =
    "select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor";

fn plain(t: &Tensor) -> Plain<'_> {
    Plain::Tensor { slot: &t.slot, dtype: t.dtype, sizes: &t.sizes, strides: &t.strides }
}

fn number<'a>(n: i64) -> Plain<'a> {
    Plain::Number(Number::Int(n))
}

/// A call the short way; `None` if it has to go the long one.
fn express(rig: &Rig, schema: &str, args: &[Plain<'_>]) -> Option<Result<Tensor, Refusal>> {
    let switches = rig.engine.switches();
    let call = Express { device: 0, op: common::op(schema), site: rig.site(), switches };
    let (slot, meta) = match rig.engine.express(&call, args.iter().copied().map(Some))? {
        Ok(made) => made,
        Err(e) => return Some(Err(e)),
    };
    match Returned::from(oxitorch_engine::Output::New(slot, meta)) {
        Returned::New(tensor) => Some(Ok(tensor)),
        _ => None,
    }
}

#[test]
fn the_short_way_makes_the_programs_of_the_long_one() {
    let rig = Rig::new();
    let half = 0.5f64.to_le_bytes();
    let (x, y) = (Tensor::new(DType::F32, &[2, 4]), Tensor::new(DType::F32, &[2, 4]));
    let host = Plain::Host { dtype: DType::F64, bytes: &half, wrapped: true };
    let dims = [1];
    // Each call both ways.
    let calls: [(&str, Vec<Plain<'_>>, Vec<ArgRef<'_>>); 4] = [
        (NEG, vec![plain(&x)], vec![x.arg()]),
        (ADD, vec![plain(&x), plain(&y), number(1)], vec![x.arg(), y.arg(), int(1)]),
        (MUL, vec![plain(&x), host], vec![x.arg(), ArgRef::Tensor(wrapped(&half))]),
        (
            SUM,
            vec![plain(&x), Plain::Ints(&dims), Plain::Number(Number::Bool(false)), Plain::None],
            vec![x.arg(), ArgRef::Ints(&dims), ArgRef::Number(Number::Bool(false)), ArgRef::None],
        ),
    ];
    [&x, &y].iter().for_each(|t| rig.write(t, 1).unwrap());
    for (schema, short, long) in &calls {
        assert!(express(&rig, schema, short).is_none(), "{schema}: it was not seen before");
        assert_eq!(rig.counts(|| ()), (0, 0), "{schema}: nothing was recorded");
        let first = rig.one(schema, long);
        rig.read(&first).unwrap();
        let ops = rig.metrics().ops.load(Relaxed);
        let mut second = None;
        let counts = rig.counts(|| second = express(&rig, schema, short));
        assert_eq!(counts, (0, 1), "{schema}");
        let second = second.unwrap().unwrap();
        assert_eq!(
            (&second.sizes, &second.strides, second.dtype),
            (&first.sizes, &first.strides, first.dtype)
        );
        assert_eq!(rig.metrics().ops.load(Relaxed), ops + 1, "{schema}: counted once");
        assert_eq!(rig.counts(|| drop(rig.read(&rig.one(schema, long)).unwrap())), (0, 1), "{schema}");
    }
}

#[test]
fn offsets_and_factors_go_the_long_way() {
    let rig = Rig::new();
    let x = rig.uploaded(DType::F32, &[2], 1);
    let (sizes, shifts, zero) = ([2, 8], [1], [0]);
    // A row looks at its offsets, and at a factor that has to fit the result.
    let calls: [(&str, Vec<Plain<'_>>, Vec<ArgRef<'_>>); 3] = [
        (
            SELECT,
            vec![plain(&x), Plain::Ints(&sizes), number(1), number(3)],
            vec![x.arg(), ArgRef::Ints(&sizes), int(1), int(3)],
        ),
        (
            ROLL,
            vec![plain(&x), Plain::Ints(&shifts), Plain::Ints(&zero)],
            vec![x.arg(), ArgRef::Ints(&shifts), ArgRef::Ints(&zero)],
        ),
        (
            ADD,
            vec![plain(&x), plain(&x), Plain::Number(Number::Float(2.5))],
            vec![x.arg(), x.arg(), common::float(2.5)],
        ),
    ];
    for (schema, short, long) in &calls {
        let result = rig.one(schema, long);
        assert!(express(&rig, schema, short).is_none(), "{schema}");
        rig.read(&result).unwrap();
    }
}

#[test]
fn what_is_out_of_the_ordinary_goes_the_long_way() {
    let rig = Rig::new();
    let x = rig.floats();
    let known = || express(&rig, NEG, &[plain(&x)]).is_some();
    rig.neg(&x);
    assert!(known());
    // Another view of the storage, another size, another device.
    assert!(express(&rig, NEG, &[plain(&x.view(&[2, 2], &[2, 1], 0))]).is_none());
    assert!(express(&rig, NEG, &[plain(&rig.uploaded(DType::F32, &[5], 1))]).is_none());
    assert!(express(&rig, NEG, &[plain(&rig.uploaded(DType::S32, &[4], 1))]).is_none());
    assert!(express(&rig, NEG, &[plain(&Tensor::new(DType::F32, &[4]))]).is_none(), "nobody wrote it");
    let far = Tensor { slot: oxitorch_engine::Slot::new(16, 1).into(), ..x.clone() };
    assert!(express(&rig, NEG, &[plain(&far)]).is_none());
    // In place.
    rig.dispatch(RELU_, &[x.arg()]).unwrap();
    assert!(express(&rig, RELU_, &[plain(&x)]).is_none());
    // Debug mode looks at each op.
    rig.mode(Mode::Debug);
    rig.neg(&x);
    assert!(!known());
    rig.mode(Mode::Fused);
    assert!(known());
    rig.sync().unwrap();
}

#[test]
fn a_window_that_is_over_is_the_long_ways() {
    let rig = Rig::new();
    let x = rig.floats();
    rig.neg(&x);
    rig.sync().unwrap();
    rig.engine.set_window(Some(3), None, None);
    let kept: Vec<_> = (0..3).map(|_| express(&rig, NEG, &[plain(&x)])).collect();
    assert!(kept.iter().all(Option::is_some));
    assert!(express(&rig, NEG, &[plain(&x)]).is_none());
    let y = rig.neg(&x);
    assert_eq!(rig.metrics().flushes()["ops"], 1);
    assert!(express(&rig, NEG, &[plain(&x)]).is_some(), "a new window");
    let number = rig.engine.compiler_options(vec![("some_option".into(), OptionValue::Bool(true))]);
    rig.engine.set_switches(|s| s.compiler_options = number);
    assert!(express(&rig, NEG, &[plain(&x)]).is_none(), "other options");
    drop(y);
}

#[test]
fn without_windows_it_launches_at_once() {
    let rig = Rig::new();
    rig.mode(Mode::Strict);
    let x = rig.floats();
    rig.neg(&x);
    rig.sync().unwrap();
    let before = rig.metrics().flushes()["mode"];
    let y = express(&rig, NEG, &[plain(&x)]).unwrap().unwrap();
    assert_eq!(rig.metrics().flushes()["mode"], before + 1);
    assert_eq!(rig.read(&y).unwrap(), [1; 16]);
}
