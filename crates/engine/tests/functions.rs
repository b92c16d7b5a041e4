//! Functions that are one program: what is noted while one is run, and launched in a later call.

use common::{ADD, MUL, MUL_, Rig, Tensor, int, results, wrapped};
use oxitorch_engine::{ArgRef, Ends, Mode, Prepared, Recipe, Slot, TensorRef, Traced};
use oxitorch_hlo::DType;
use std::sync::atomic::Ordering::Relaxed;

mod common;

const CLONE: &str = "clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor";
const RUN: Ends<'_> = Ends { step: false, dry: false, donated: &[] };

/// Runs a function on these arguments; its results, and what came of it.
fn traced(
    rig: &Rig,
    args: &[TensorRef<'_>],
    ends: Ends<'_>,
    function: impl FnOnce() -> Vec<Tensor>,
) -> (Vec<Tensor>, Traced) {
    let switches = rig.engine.switches();
    assert!(rig.stream().trace(args, rig.site(), &switches, false).unwrap());
    let outputs = function();
    let refs: Vec<TensorRef<'_>> = outputs.iter().map(Tensor::by_ref).collect();
    let traced = rig.stream().traced(args, &refs, &switches, ends).unwrap();
    rig.stream().launch_noted(rig.site()).unwrap();
    (outputs, traced)
}

fn recipe(traced: Traced) -> Recipe {
    match traced {
        Traced::Function(recipe) => *recipe,
        other => panic!("{other:?}"),
    }
}

fn called(rig: &Rig, recipe: &Recipe, args: &[TensorRef<'_>]) -> Option<Vec<Slot>> {
    let switches = rig.engine.switches();
    rig.stream().replay(recipe, args, rig.site(), &switches, &|_, blocks| (7, blocks)).unwrap()
}

/// `relu(-x) + w`.
fn function(rig: &Rig, x: &Tensor, w: &Tensor) -> Vec<Tensor> {
    vec![rig.add(&rig.relu(&rig.neg(x)), w)]
}

#[test]
fn a_call_is_one_launch_of_the_program_that_the_first_run_made() {
    for mode in [Mode::Fused, Mode::Strict] {
        let rig = Rig::new();
        rig.mode(mode);
        let (x, w) = (rig.floats(), rig.floats());
        let args = [x.by_ref(), w.by_ref()];
        let before = rig.relu(&x);
        let (outputs, outcome) = traced(&rig, &args, RUN, || function(&rig, &x, &w));
        let recipe = recipe(outcome);
        rig.sync().unwrap();
        drop((outputs, before));
        for call in 0..4 {
            let counts = rig.counts(|| {
                drop(called(&rig, &recipe, &args).unwrap());
                rig.sync().unwrap();
            });
            assert_eq!(counts, (0, 1), "call {call}, {mode:?}");
        }
        // What is around it is no part of it.
        let counts = rig.counts(|| {
            let y = rig.neg(&x);
            drop(called(&rig, &recipe, &args).unwrap());
            rig.sync().unwrap();
            drop(y);
        });
        assert_eq!(counts.1, 2, "{mode:?}");
    }
}

#[test]
fn one_value_of_two_arguments_is_not_given_away_twice() {
    let rig = Rig::new();
    let (x, v, w) = (rig.floats(), rig.floats(), rig.floats());
    let args = [x.by_ref(), v.by_ref(), w.by_ref()];
    let (_, outcome) = traced(&rig, &args, RUN, || {
        rig.dispatch(MUL_, &[v.arg(), x.arg()]).unwrap();
        rig.dispatch(MUL_, &[w.arg(), x.arg()]).unwrap();
        Vec::new()
    });
    let recipe = recipe(outcome);
    rig.sync().unwrap();
    let donated = || rig.metrics().donations.load(Relaxed);
    let mut given = Vec::new();
    for shares in [false, false, true, false] {
        if shares {
            rig.copy(&v, &w);
        }
        let before = donated();
        assert!(called(&rig, &recipe, &args).unwrap().is_empty());
        rig.sync().unwrap();
        given.push(donated() - before);
    }
    assert_eq!(given, [2, 2, 0, 2]);
}

#[test]
fn a_long_function_is_not_cut() {
    let rig = Rig::new();
    let x = rig.floats();
    let args = [x.by_ref()];
    let (outputs, outcome) = traced(&rig, &args, RUN, || vec![rig.chain(&x, 4000, 1)]);
    let recipe = recipe(outcome);
    rig.sync().unwrap();
    drop(outputs);
    assert_eq!(rig.fake.programs().len(), 1);
    assert_eq!(rig.counts(|| drop(called(&rig, &recipe, &args).unwrap())), (0, 1));
}

#[test]
fn what_it_writes_is_overwritten() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let args = [x.by_ref(), w.by_ref()];
    let (_, outcome) = traced(&rig, &args, RUN, || {
        rig.dispatch(MUL_, &[w.arg(), x.arg()]).unwrap();
        Vec::new()
    });
    let recipe = recipe(outcome);
    rig.sync().unwrap();
    for _ in 0..3 {
        let bytes = rig.bytes();
        let counts = rig.counts(|| {
            assert!(called(&rig, &recipe, &args).unwrap().is_empty());
            rig.sync().unwrap();
        });
        assert_eq!((counts, rig.bytes()), ((0, 1), bytes), "in the memory of the value before");
    }
    // Where that is seen elsewhere, it stays.
    let old = rig.one(CLONE, &[w.arg(), ArgRef::None]);
    let bytes = rig.bytes();
    called(&rig, &recipe, &args).unwrap();
    rig.sync().unwrap();
    assert_eq!(rig.bytes(), bytes + w.bytes() as u64);
    rig.read(&old).unwrap();
}

#[test]
fn arguments_that_are_given_away_are_gone() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let ends = Ends { donated: &[1], ..RUN };
    let (outputs, outcome) = traced(&rig, &[x.by_ref(), w.by_ref()], ends, || function(&rig, &x, &w));
    let recipe = recipe(outcome);
    let gone = |t: &Tensor| rig.read(t).unwrap_err().message.contains("donate_argnums");
    assert!(gone(&w) && !outputs.is_empty());
    rig.read(&x).unwrap();
    let other = rig.floats();
    let bytes = rig.bytes();
    let made = called(&rig, &recipe, &[x.by_ref(), other.by_ref()]).unwrap();
    rig.sync().unwrap();
    assert_eq!(rig.bytes(), bytes, "the result has the memory");
    assert!(gone(&other));
    drop(made);
}

#[test]
fn what_outlives_it_is_named() {
    let rig = Rig::new();
    let x = rig.floats();
    let mut kept = None;
    let (_, outcome) = traced(&rig, &[x.by_ref()], RUN, || {
        kept = Some(rig.at(17).neg(&x));
        vec![rig.at(18).relu(&x)]
    });
    let Traced::Kept(sites) = outcome else { panic!("{outcome:?}") };
    assert_eq!(sites.iter().map(|s| s.0).collect::<Vec<_>>(), [17]);
    rig.read(&kept.unwrap()).unwrap();
}

#[test]
fn what_it_depends_on_besides_is_named() {
    let rig = Rig::new();
    let (x, other) = (rig.floats(), rig.floats());
    let add = || vec![rig.at(5).add(&x, &other)];
    let (_, outcome) = traced(&rig, &[x.by_ref()], RUN, add);
    assert!(matches!(outcome, Traced::Refused(_, site) if site.0 == 5), "{outcome:?}");
    // One that it finds.
    let (args, switches) = ([x.by_ref(), other.by_ref()], rig.engine.switches());
    assert!(rig.stream().trace(&args[..1], rig.site(), &switches, false).unwrap());
    rig.stream().trace_also(&args[1], rig.site()).unwrap();
    let y = rig.add(&x, &other);
    let outcome = rig.stream().traced(&args, &[y.by_ref()], &switches, RUN).unwrap();
    assert!(called(&rig, &recipe(outcome), &args).is_some());
    let (_, outcome) = traced(&rig, &[x.by_ref()], RUN, || {
        rig.read(&x).unwrap();
        vec![rig.relu(&x)]
    });
    assert!(matches!(outcome, Traced::Refused("a value that the host reads", _)), "{outcome:?}");
}

#[test]
fn tensors_that_share_a_value_are_told_apart() {
    let rig = Rig::new();
    let x = rig.floats();
    let same = rig.one(CLONE, &[x.arg(), ArgRef::None]);
    let args = [x.by_ref(), same.by_ref()];
    let (_, outcome) = traced(&rig, &args, RUN, || vec![rig.add(&x, &same)]);
    let recipe = recipe(outcome);
    rig.sync().unwrap();
    let (a, b) = (rig.floats(), rig.floats());
    let texts = rig.compiled(|| {
        drop(called(&rig, &recipe, &[a.by_ref(), b.by_ref()]).unwrap());
        rig.sync().unwrap();
    });
    assert!(texts.len() <= 1, "{texts:?}");
}

#[test]
fn a_dry_run_leaves_no_trace() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    rig.sync().unwrap();
    let args = [x.by_ref(), w.by_ref()];
    let ends = Ends { dry: true, donated: &[0], ..RUN };
    let mut made = None;
    let counts = rig.counts(|| {
        let (outputs, outcome) = traced(&rig, &args, ends, || {
            rig.dispatch(MUL_, &[w.arg(), x.arg()]).unwrap();
            function(&rig, &x, &w)
        });
        drop(outputs);
        made = Some(recipe(outcome));
        rig.sync().unwrap();
    });
    assert_eq!(counts, (0, 0));
    assert_eq!((rig.read(&x).unwrap(), rig.read(&w).unwrap()), (vec![1; 16], vec![1; 16]));
    // Its program is made ahead of the calls that run it.
    let (made, switches) = (made.unwrap(), rig.engine.switches());
    let counts = rig.counts(|| {
        let steps = rig.engine.prepare(0, &made, rig.site(), &switches).unwrap();
        let [Prepared::Program(number)] = steps[..] else { panic!("{steps:?}") };
        assert!(rig.engine.graph(number).is_some(), "waits for the compiler");
    });
    assert_eq!(counts, (1, 0));
    let counts = rig.counts(|| {
        drop(called(&rig, &made, &args).unwrap());
        rig.sync().unwrap();
    });
    assert_eq!(counts, (0, 1));
    assert_eq!(results(&rig.fake.programs()[0]), 2);
}

#[test]
fn numbers_and_dtypes_of_results_are_as_they_were() {
    let rig = Rig::new();
    let x = rig.floats();
    let (outputs, outcome) = traced(&rig, &[x.by_ref()], RUN, || {
        let two = 2f64.to_le_bytes();
        vec![
            rig.one(MUL, &[x.arg(), ArgRef::Tensor(wrapped(&two))]),
            rig.one(ADD, &[x.arg(), x.arg(), int(1)]),
        ]
    });
    let recipe = recipe(outcome);
    assert_eq!(outputs.len(), recipe.outputs().len());
    assert!(recipe.outputs().iter().all(|o| o.layout().0 == DType::F32));
    assert!(called(&rig, &recipe, &[x.by_ref()]).is_some_and(|made| made.len() == 2));
    let longer = rig.uploaded(DType::F32, &[5], 1);
    assert!(called(&rig, &recipe, &[longer.by_ref()]).is_none());
}
