//! Calls of ops that have a decomposition: what tells their kinds apart.

use common::{Tensor, int};
use oxitorch_aten::Schema;
use oxitorch_aten::args::Number;
use oxitorch_engine::{ArgRef, Decomposed};
use oxitorch_hlo::DType;

mod common;

fn bind(schema: &str) -> Option<Decomposed> {
    Decomposed::bind(&Schema::parse(schema).unwrap())
}

#[test]
fn only_what_gives_new_tensors_and_writes_nothing_has_recipes() {
    assert!(bind("f(Tensor self, int n) -> (Tensor, Tensor)").is_some());
    for schema in [
        "f_(Tensor(a!) self) -> Tensor(a!)",
        "f(Tensor(a) self) -> Tensor(a)",
        "f(Tensor self) -> Tensor[]",
        "f(Tensor self) -> int",
        "f(Tensor self) -> ()",
    ] {
        assert!(bind(schema).is_none(), "{schema}");
    }
}

#[test]
fn types_sizes_and_numbers_tell_kinds_apart() {
    let op = bind("f(Tensor self, Scalar[] n, str how, Tensor?[] more) -> Tensor").unwrap();
    let x = Tensor::new(DType::F32, &[2, 3]);
    let calls = [
        (&x, 1, "sum"),
        (&Tensor::new(DType::F32, &[3, 2]), 1, "sum"),
        (&Tensor::new(DType::S32, &[2, 3]), 1, "sum"),
        (&x, 2, "sum"),
        (&x, 1, "mean"),
    ];
    let ask = |(t, n, how): (&Tensor, i64, &'static str), number: i64| {
        let numbers = ArgRef::Numbers(vec![Number::Int(n), Number::Float(0.5)]);
        op.kind(&[t.arg(), numbers, ArgRef::Str(how), ArgRef::Tensors(vec![])], || number)
    };
    for (number, call) in (1..).zip(calls) {
        assert_eq!(ask(call, number), Some(number));
    }
    for (number, call) in (1..).zip(calls) {
        assert_eq!(ask(call, 99), Some(number), "known");
    }
}

#[test]
fn what_no_decomposition_takes_has_no_kind() {
    let op = bind("f(Tensor self, int n, MemoryFormat? format=None, Generator? g=None) -> Tensor").unwrap();
    let x = Tensor::new(DType::F32, &[2]);
    let ask = |format: ArgRef<'static>, g: ArgRef<'static>| op.kind(&[x.arg(), int(1), format, g], || 1);
    assert_eq!(ask(ArgRef::None, ArgRef::None), Some(1));
    assert_eq!(ask(int(2), ArgRef::None), None);
    assert_eq!(ask(ArgRef::None, ArgRef::Generator(0)), None);
    op.has_none();
    assert_eq!(ask(ArgRef::None, ArgRef::None), None);
}

#[test]
fn kinds_beyond_the_bound_are_not_kept() {
    let op = bind("f(Tensor self, int n) -> Tensor").unwrap();
    let x = Tensor::new(DType::F32, &[2]);
    let ask = |n: i64| op.kind(&[x.arg(), int(n)], || n);
    assert!((1..=1024).all(|n| ask(n) == Some(n)));
    assert_eq!((ask(1025), ask(7)), (Some(0), Some(7)));
}
