//! The map from windows to programs: what is compiled, and what is known already.

use std::sync::atomic::Ordering::Relaxed;

use common::{MUL, MUL_, NEG, Rig, Tensor, count_of, donors, options, results, wrapped};
use oxitorch_aten::args::Number;
use oxitorch_engine::{ArgRef, CacheOptions, Mode, Options, Reason, Remembered};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

const SUM: &str =
    "sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor";
const ROLL: &str = "roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor";

/// How many programs each round compiles, and how many it launches.
fn rounds(rig: &Rig, count: i64, mut round: impl FnMut(i64)) -> Vec<(usize, usize)> {
    (0..count).map(|i| rig.counts(|| round(i))).collect()
}

#[test]
fn the_second_round_of_a_loop_is_known() {
    let rig = Rig::new();
    let (weight, mut state) = (rig.floats(), rig.floats());
    let counts = rounds(&rig, 4, |_| {
        let x = rig.at(1).floats();
        let y = rig.at(2).one(MUL, &[x.arg(), weight.arg()]);
        let z = rig.at(3).add(&y, &state);
        state = rig.at(4).relu(&z);
        drop((x, y, z));
        rig.at(5).cut(Reason::Step);
    });
    assert_eq!(counts, [(1, 1), (0, 1), (0, 1), (0, 1)]);
    assert_eq!(rig.metrics().window_hits.load(Relaxed), 3);
    assert_eq!(rig.programs_and_launches(), (1, 4));
}

#[test]
fn other_sizes_dtypes_and_operands_are_other_programs() {
    let rig = Rig::new();
    let f = |sizes: &[i64]| rig.uploaded(DType::F32, sizes, 1);
    let (x, y) = (f(&[4]), f(&[4]));
    let compiles = |f: &dyn Fn() -> Tensor| rig.counts(|| drop(rig.read(&f()).unwrap())).0;
    assert_eq!(compiles(&|| rig.add(&x, &y)), 1);
    assert_eq!(compiles(&|| rig.add(&y, &x)), 0, "other tensors, the same ops");
    assert_eq!(compiles(&|| rig.add(&x, &x)), 1, "one operand instead of two");
    assert_eq!(
        compiles(&|| rig.add(&f(&[2, 2]), &f(&[2, 2]))),
        1,
        "the tensors are gone then: so are donors"
    );
    let doubles = rig.uploaded(DType::F64, &[4], 1);
    assert_eq!(compiles(&|| rig.add(&doubles, &doubles)), 1);
    assert_eq!(compiles(&|| rig.add(&rig.add(&x, &y), &y)), 1, "more ops");
}

#[test]
fn numbers_are_operands() {
    let rig = Rig::new();
    let x = rig.floats();
    let counts = rounds(&rig, 3, |i| {
        let bytes = (i as f64 + 0.123).to_le_bytes();
        drop(rig.read(&rig.one(MUL, &[x.arg(), ArgRef::Tensor(wrapped(&bytes))])).unwrap());
    });
    assert_eq!(counts, [(1, 1), (0, 1), (0, 1)]);
    let program = &rig.fake.programs()[0];
    assert!(donors(program).0 == 2 && !program.contains("0.123"), "{program}");
    // Numbers that come again are not copied again.
    let copies = |n: f64| {
        let before = rig.fake.calls("PJRT_Client_BufferFromHostBuffer");
        drop(rig.read(&rig.one(MUL, &[x.arg(), ArgRef::Tensor(wrapped(&n.to_le_bytes()))])).unwrap());
        rig.fake.calls("PJRT_Client_BufferFromHostBuffer") - before
    };
    assert_eq!((copies(0.123), copies(77.0), copies(77.0)), (0, 1, 0));
}

#[test]
fn offsets_become_operands_with_the_second_value() {
    let rig = Rig::new();
    let x = rig.uploaded(DType::F32, &[64], 1);
    let read = |i: i64| drop(rig.read(&rig.neg(&x.narrow(i, 4))).unwrap());
    assert_eq!(rounds(&rig, 5, |i| read(3 * i)), [(1, 1), (1, 1), (0, 1), (0, 1), (0, 1)]);
    let [fixed, general] = &rig.fake.programs()[..] else { panic!() };
    assert_eq!((donors(fixed).0, donors(general).0), (1, 2), "{general}");
    assert_eq!((count_of(fixed, "dynamic_slice"), count_of(general, "dynamic_slice")), (0, 1), "{general}");
    // The first value still has its own, faster program.
    let before = rig.fake.calls("PJRT_Client_BufferFromHostBuffer");
    assert_eq!(rig.counts(|| read(0)), (0, 1));
    assert_eq!(rig.fake.calls("PJRT_Client_BufferFromHostBuffer"), before, "it takes no offsets");
    // Another offset of the same window varies too: once more.
    let two = |i: i64, k: i64| drop(rig.read(&rig.add(&x.narrow(i, 4), &x.narrow(k, 4))).unwrap());
    let counts = rounds(&rig, 3, |i| two(i, 7)).into_iter().chain(rounds(&rig, 3, |i| two(9, 20 + i)));
    assert_eq!(counts.map(|c| c.0).collect::<Vec<_>>(), [1, 1, 0, 1, 0, 0]);
}

#[test]
fn offsets_of_arguments_are_like_those_of_views() {
    let rig = Rig::new();
    let x = rig.uploaded(DType::F32, &[64], 1);
    let counts = rounds(&rig, 4, |i| {
        let shifts = [i + 1];
        drop(rig.read(&rig.one(ROLL, &[x.arg(), ArgRef::Ints(&shifts), ArgRef::Ints(&[0])])).unwrap());
    });
    assert_eq!(counts.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 1, 0, 0]);
}

#[test]
fn a_few_offsets_of_an_op_alone_stay_constants() {
    let rig = Rig::new();
    rig.mode(Mode::Strict);
    let x = rig.uploaded(DType::F32, &[64], 1);
    let counts = rounds(&rig, 8, |i| drop(rig.neg(&x.narrow(i, 4))));
    assert_eq!(counts.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 1, 1, 1, 1, 0, 0, 0]);
    let takes: Vec<usize> = rig.fake.programs().iter().map(|p| donors(p).0).collect();
    assert_eq!(takes, [1, 1, 1, 1, 2]);
}

#[test]
fn a_program_that_does_more_stands_in_until_a_loop_settles() {
    let rig = Rig::new();
    let x = rig.floats();
    let window = |keep: bool| {
        let y = rig.at(1).neg(&x);
        let z = rig.at(2).relu(&y);
        let _kept = keep.then_some(y);
        rig.cut(Reason::Step);
        z
    };
    assert_eq!(rig.counts(|| drop(window(true))), (1, 1));
    assert_eq!(rig.counts(|| drop(window(true))), (0, 1)); // a loop
    let fewer = rounds(&rig, 5, |_| drop(window(false)));
    assert_eq!(fewer.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1, 0, 0, 0], "once");
    let results: Vec<usize> = rig.fake.programs().iter().map(|p| results(p)).collect();
    assert_eq!(results, [2, 1]);
}

#[test]
fn a_program_that_does_less_does_not_stand_in() {
    let rig = Rig::new();
    let x = rig.floats();
    let window = |keep: bool| {
        let y = rig.neg(&x);
        let z = rig.relu(&y);
        let _kept = keep.then_some(y);
        rig.read(&z).unwrap();
    };
    assert_eq!(rounds(&rig, 3, |i| window(i > 0)).iter().map(|c| c.0).collect::<Vec<_>>(), [1, 1, 0]);
}

#[test]
fn one_text_is_compiled_once() {
    let rig = Rig::new();
    let (x, w, y) = (rig.floats(), rig.floats(), Tensor::new(DType::F32, &[4]));
    let new = rig.one(MUL, &[x.arg(), w.arg()]);
    rig.read(&new).unwrap();
    // The same in place, on a tensor that shares its value with `x`: another window, and the same text.
    rig.copy(&x, &y);
    let multiply = || drop(rig.dispatch(MUL_, &[y.arg(), w.arg()]).unwrap());
    assert_eq!(rig.counts(multiply), (0, 1));
    assert_eq!(rig.programs_and_launches(), (2, 2));
    assert_eq!(rig.metrics().cache_hits.load(Relaxed), 1);
}

#[test]
fn what_was_let_go_of_is_made_again() {
    let cache = CacheOptions { max_loaded: 1, ..CacheOptions::default() };
    let rig = Rig::with(FakePlugin::new(), Platform::Tpu, &Options { cache, ..options() });
    let x = rig.floats();
    let compiles = |f: &dyn Fn() -> Tensor| rig.counts(|| drop(rig.read(&f()).unwrap())).0;
    let (neg, relu) = (|| rig.neg(&x), || rig.relu(&x));
    assert_eq!([compiles(&neg), compiles(&neg), compiles(&relu), compiles(&neg)], [1, 0, 1, 1]);
    assert_eq!(rig.programs_and_launches().0, 2, "the map knows them still");
}

#[test]
fn what_is_remembered_has_a_bound() {
    let rig = Rig::new();
    rig.engine.remember(Remembered { programs: 4, ops: 4 });
    for n in 1..30 {
        let x = rig.uploaded(DType::F32, &[n], 1);
        rig.read(&rig.neg(&x)).unwrap();
    }
    let report = rig.engine.devices()[0];
    assert!(report.known_programs <= 4, "{report:?}");
    // What was forgotten is learned again, and its executable is still there.
    let x = rig.uploaded(DType::F32, &[1], 1);
    assert_eq!(rig.counts(|| drop(rig.read(&rig.neg(&x)).unwrap())), (0, 1));
}

#[test]
fn programs_can_be_forbidden() {
    let rig = Rig::new();
    let x = rig.floats();
    let y = rig.neg(&x);
    rig.read(&y).unwrap();
    rig.engine.allow_programs(Some(0));
    assert_eq!(rig.counts(|| drop(rig.read(&rig.neg(&x)).unwrap())), (0, 1), "it is not new");
    let z = rig.at(7).relu(&x);
    let e = rig.at(8).read(&z).unwrap_err();
    assert!(e.message.contains("max_graphs") && e.message.contains("program 2: 1 op, relu"), "{e}");
    rig.engine.allow_programs(None);
    assert!(rig.read(&rig.relu(&x)).is_ok());
    assert!(rig.read(&z).is_err(), "it was never computed");
}

#[test]
fn each_program_has_a_reason() {
    let rig = Rig::new();
    for (line, size) in [(1, 4), (1, 8)] {
        let x = rig.uploaded(DType::F32, &[size], 1);
        rig.at(line).read(&rig.neg(&x)).unwrap();
    }
    let why = rig.engine.explanations();
    assert_eq!(why.len(), 2);
    assert!(why[0].contains("the first program"), "{}", why[0]);
    assert!(why[1].contains("float32[8], was float32[4]") && why[1].contains("script.py:1"), "{}", why[1]);
}

#[test]
fn programs_can_be_looked_at() {
    let rig = Rig::new();
    let x = rig.floats();
    let y = rig.at(3).neg(&x);
    let z = rig.at(4).relu(&y);
    drop(x);
    rig.at(5).read(&z).unwrap();
    rig.sync().unwrap();
    let [graph] = &rig.engine.graphs(0)[..] else { panic!() };
    assert_eq!((graph.launches, graph.ended_by), (1, Some(Reason::Read)));
    let ops: Vec<_> = graph.ops.iter().map(|o| (o.op.as_str(), o.line.as_deref().unwrap())).collect();
    assert_eq!(ops, [("neg", "script.py:3"), ("relu", "script.py:4")]);
    assert_eq!((graph.inputs.len(), graph.outputs.len(), graph.donated.as_slice()), (1, 2, &[0][..]));
    assert_eq!(rig.engine.graph(0).unwrap().stablehlo, rig.fake.programs()[0]);
    assert!(rig.engine.graph(1).is_none());
    drop(y);
}

#[test]
fn a_window_that_is_too_long_is_cut_into_parts_that_repeat() {
    let rig = Rig::new();
    let x = rig.floats();
    // Steps of 20 ops; nothing of it fits into one program.
    let long = |steps: i64| {
        let mut y = x.clone();
        for _ in 0..steps {
            y = rig.relu(&y);
            y = (0..19).fold(y, |y, _| rig.neg(&y));
        }
        rig.read(&y).unwrap();
    };
    let first = rig.counts(|| long(80));
    assert_eq!(rig.metrics().splits.load(Relaxed), 1);
    assert!(first.0 <= 3 && first.1 >= 5, "{first:?}");
    let again = rig.counts(|| long(80));
    assert_eq!((again.0, again.1), (0, first.1));
    // Another length is made of the same parts, and of smaller ones.
    let other = rig.counts(|| long(96));
    assert!(other.0 <= 1 && other.1 >= 6, "{other:?}");
}

#[test]
fn a_change_costs_what_is_new() {
    let rig = Rig::new();
    let x = rig.floats();
    let body =
        |y: &Tensor| (0..150).fold(y.clone(), |y, i| if i % 3 == 0 { rig.relu(&y) } else { rig.neg(&y) });
    let step = |size: i64| {
        let start = rig.uploaded(DType::F32, &[size], 1);
        let args = [start.arg(), ArgRef::Ints(&[0]), ArgRef::Number(Number::Bool(true)), ArgRef::None];
        let start = rig.one(SUM, &args);
        rig.read(&body(&rig.add(&x, &start))).unwrap();
    };
    assert_eq!(rig.counts(|| step(3)).0, 1);
    rig.sync().unwrap();
    // What surrounds the known part is new, and the part itself becomes a program of its own once.
    let negations = |size| rig.compiled(|| step(size)).iter().map(|p| count_of(p, "negate")).sum::<usize>();
    assert_eq!(negations(5), 100);
    assert_eq!(rig.metrics().splits.load(Relaxed), 1, "the middle is known");
    assert_eq!(negations(7), 0);
}

#[test]
fn windows_that_are_new_each_time_share_the_programs_of_their_ops() {
    let rig = Rig::new();
    let x = rig.floats();
    // Eight ops, in an order that follows from a number, as where a net has the structure of its input.
    let round = |order: u32| {
        let op = |y: Tensor, i: u32| if order >> i & 1 == 0 { rig.neg(&y) } else { rig.relu(&y) };
        rig.at(7);
        rig.read(&(0..8).fold(x.clone(), op)).unwrap()
    };
    let one_each = rig.counts(|| (0..8).for_each(|order| drop(round(order))));
    assert_eq!(one_each, (8, 8), "a loop may settle yet");
    let next = rig.counts(|| (8..40).for_each(|order| drop(round(order))));
    assert!(next.0 <= 6, "two ops, and what each may overwrite: {next:?}");
    assert_eq!(next.1, 32 * 8);
    assert_eq!(rig.metrics().splits.load(Relaxed), 32);
    // A thread compiles it while parts go on.
    let before = rig.fake.programs().len();
    drop(round(30));
    common::eventually("what comes again is a program", || rig.fake.programs().len() == before + 1);
    common::eventually("it runs", || rig.counts(|| drop(round(30))) == (0, 1));
    // Where a new size comes each time nothing is shared.
    let sizes = rig.counts(|| {
        for size in 10..30 {
            let y = rig.uploaded(DType::F32, &[size], 1);
            rig.read(&rig.at(9).chain(&y, 4, 9)).unwrap();
        }
    });
    assert_eq!(sizes.1, 20, "one launch each");
}

#[test]
fn a_quick_version_is_replaced_while_it_runs() {
    let rig = Rig::with(FakePlugin::new(), Platform::Tpu, &Options { background_compile: true, ..options() });
    let x = rig.floats();
    let round = || drop(rig.read(&rig.chain(&x, 40, 1)).unwrap());
    assert_eq!(rig.counts(round), (1, 1));
    assert_eq!(rig.metrics().background_compiles.load(Relaxed), 0, "one that runs once stays quick");
    round();
    common::eventually("the better version", || rig.metrics().swaps.load(Relaxed) == 1);
    assert_eq!(rig.counts(|| (0..5).for_each(|_| round())), (0, 5));
    assert_eq!(rig.fake.programs().len(), 2);
    assert_eq!(rig.fake.programs()[0], rig.fake.programs()[1], "the same program with other options");
    // A quick version that cannot be replaced goes on.
    let y = rig.uploaded(DType::F32, &[8], 1);
    let other = || drop(rig.read(&rig.chain(&y, 40, 1)).unwrap());
    other();
    rig.fake.fail_once("PJRT_Client_Compile", 13, "out of luck");
    (0..3).for_each(|_| other());
    rig.sync().unwrap();
}

#[test]
fn what_is_closed_says_so() {
    let rig = Rig::new();
    let x = rig.floats();
    let y = rig.neg(&x);
    rig.engine.close();
    assert!(rig.engine.stream(0).is_err());
    let e = rig.dispatch(NEG, &[y.arg()]).map(drop).map_err(common::error).unwrap_err();
    assert!(e.message.contains("closed"), "{e}");
}
