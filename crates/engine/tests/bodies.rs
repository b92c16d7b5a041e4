//! Loops and branches: what their bodies are recorded as, and what cannot be one.

use std::cell::RefCell;

use common::{MUL_, Returned, Rig, Tensor};
use oxitorch_engine::{ArgRef, Asked, Outputs, Refusal, Switches};
use oxitorch_hlo::{DType, TensorType};

mod common;

const DROPOUT: &str = "native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)";

/// Blocks by which the generator was moved on.
type Blocks = RefCell<Vec<u64>>;

/// The operations of this name, also those with regions.
fn count(program: &str, operation: &str) -> usize {
    program.matches(&format!("stablehlo.{operation}")).count()
}

fn types(like: &[&Tensor]) -> Vec<TensorType> {
    like.iter().map(|t| TensorType::new(t.dtype, t.sizes.as_slice())).collect()
}

fn tensors(outputs: Outputs) -> Vec<Tensor> {
    let tensor = |output| match Returned::from(output) {
        Returned::New(tensor) => tensor,
        other => panic!("{other:?}"),
    };
    outputs.into_iter().map(tensor).collect()
}

/// Records a body; why it is none, if it is none.
fn body(rig: &Rig, like: &[&Tensor], run: impl FnOnce(&[Tensor]) -> Vec<Tensor>) -> Option<&'static str> {
    let switches = rig.engine.switches();
    let given = rig.stream().begin_body(&types(like), rig.site(), &switches).unwrap().unwrap();
    let results = run(&tensors(given));
    let refs: Vec<_> = results.iter().map(Tensor::by_ref).collect();
    rig.stream().end_body(&refs, rig.site(), &|_, blocks| (7, blocks)).unwrap().map(|(why, _)| why)
}

fn control(rig: &Rig, asked: Asked, operands: &[&Tensor]) -> Result<Vec<Tensor>, &'static str> {
    let refs: Vec<_> = operands.iter().map(|t| t.by_ref()).collect();
    let switches: Switches = rig.engine.switches();
    let done = rig.stream().control("loop", asked, &refs, rig.site(), &switches, &|_, blocks| (7, blocks));
    done.unwrap().map(tensors)
}

const FOUR: Asked = Asked::Scan { length: 4, reverse: false, carried: 1, states: 0 };

fn flag(rig: &Rig) -> Tensor {
    rig.uploaded(DType::Pred, &[], 1)
}

/// The only program of what is recorded.
fn only(rig: &Rig, record: impl FnOnce() -> Vec<Tensor>) -> String {
    let mut programs = rig.compiled(|| {
        let results = record();
        rig.sync().unwrap();
        drop(results);
    });
    assert_eq!(programs.len(), 1, "{programs:?}");
    programs.remove(0)
}

#[test]
fn a_loop_is_one_op_of_the_window_around_it() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let programs = rig.compiled(|| {
        let before = rig.neg(&x);
        assert_eq!(body(&rig, &[&x], |now| vec![rig.add(&rig.relu(&now[0]), &w)]), None);
        let out =
            control(&rig, Asked::Scan { length: 100, reverse: false, carried: 1, states: 0 }, &[&before]);
        rig.read(&out.unwrap()[0]).unwrap();
    });
    let [program] = programs.as_slice() else { panic!("{programs:?}") };
    assert_eq!(count(program, "while"), 1);
    assert_eq!(count(program, "maximum"), 1, "{program}");
    assert_eq!(count(program, "negate"), 1);
}

#[test]
fn the_same_bodies_are_the_same_program() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let round = || {
        body(&rig, &[&x], |now| vec![rig.add(&now[0], &w)]);
        rig.read(&control(&rig, FOUR, &[&x]).unwrap()[0]).unwrap();
    };
    assert_eq!(rig.counts(round), (1, 1));
    assert_eq!(rig.counts(round), (0, 1));
    let other = || {
        body(&rig, &[&x], |now| vec![rig.add(&w, &now[0])]);
        rig.read(&control(&rig, FOUR, &[&x]).unwrap()[0]).unwrap();
    };
    assert_eq!(rig.counts(other), (1, 1), "other operands");
}

#[test]
fn slices_go_in_and_are_stacked() {
    let rig = Rig::new();
    let (x, xs) = (rig.floats(), rig.uploaded(DType::F32, &[4, 4], 1));
    let program = only(&rig, || {
        body(&rig, &[&x, &x], |now| vec![rig.add(&now[0], &now[1]), rig.neg(&now[1])]);
        let out = control(&rig, FOUR, &[&x, &xs]).unwrap();
        assert_eq!(out.iter().map(|t| t.sizes.clone()).collect::<Vec<_>>(), [vec![4], vec![4, 4]]);
        out
    });
    assert_eq!(count(&program, "dynamic_slice"), 1, "{program}");
    assert_eq!(count(&program, "dynamic_update_slice"), 1, "{program}");
}

#[test]
fn branches_take_what_they_need_from_outside() {
    let rig = Rig::new();
    let (x, w, v) = (rig.floats(), rig.floats(), rig.floats());
    let program = only(&rig, || {
        body(&rig, &[&x], |now| vec![rig.add(&now[0], &w)]);
        body(&rig, &[&x], |now| vec![rig.add(&now[0], &v)]);
        control(&rig, Asked::Branch, &[&flag(&rig), &x]).unwrap()
    });
    assert_eq!(count(&program, "if"), 1, "{program}");
    assert!(program.contains("%arg3"), "the flag, the operand and one from outside for each: {program}");
}

#[test]
fn a_loop_goes_round_while_its_condition_holds() {
    let rig = Rig::new();
    let (go, x) = (flag(&rig), rig.floats());
    let program = only(&rig, || {
        body(&rig, &[&go, &x], |now| vec![now[0].clone()]);
        body(&rig, &[&go, &x], |now| vec![now[0].clone(), rig.neg(&now[1])]);
        let out = control(&rig, Asked::While, &[&go, &x]).unwrap();
        assert_eq!(out.len(), 2);
        out
    });
    assert_eq!(count(&program, "while"), 1, "{program}");
}

#[test]
fn loops_are_in_loops() {
    let rig = Rig::new();
    let x = rig.floats();
    let inner = |x: &Tensor| {
        assert_eq!(body(&rig, &[x], |now| vec![rig.neg(&now[0])]), None);
        control(&rig, FOUR, &[x]).unwrap().remove(0)
    };
    let program = only(&rig, || {
        assert_eq!(body(&rig, &[&x], |now| vec![inner(&now[0])]), None);
        control(&rig, FOUR, &[&x]).unwrap()
    });
    assert_eq!(count(&program, "while"), 2, "{program}");
}

/// Why it is no body, and what it does with what it is given.
type Case<'a> = (&'a str, &'a dyn Fn(&Tensor));

#[test]
fn what_needs_a_launch_is_no_body() {
    let rig = Rig::new();
    let x = rig.floats();
    let recorded = rig.neg(&x);
    // Each leaves the window around it as it was.
    let cases: [Case<'_>; 4] = [
        ("a value that the host reads", &|now| drop(rig.read(&rig.neg(now)).unwrap_err())),
        ("a value that the host reads", &|_| drop(rig.read(&recorded).unwrap_err())),
        ("what it recorded to be launched", &|_| drop(rig.sync().unwrap_err())),
        ("to write to a tensor that it is not given", &|now| {
            drop(rig.dispatch(MUL_, &[x.arg(), now.arg()]).map(drop).unwrap_err());
        }),
    ];
    for (why, what) in cases {
        let found = body(&rig, &[&x], |now| {
            what(&now[0]);
            vec![rig.neg(&now[0])]
        });
        assert_eq!(found, Some(why));
    }
    assert_eq!(rig.programs_and_launches(), (0, 0));
    rig.read(&recorded).unwrap();
    assert_eq!(rig.programs_and_launches(), (1, 1));
}

#[test]
fn values_of_a_body_are_nobodys() {
    let rig = Rig::new();
    let x = rig.floats();
    let mut kept = None;
    body(&rig, &[&x], |now| {
        kept = Some((now[0].clone(), rig.relu(&now[0])));
        vec![rig.neg(&now[0])]
    });
    rig.read(&control(&rig, FOUR, &[&x]).unwrap()[0]).unwrap();
    let (given, made) = kept.unwrap();
    for tensor in [given, made] {
        assert!(rig.read(&tensor).unwrap_err().message.contains("hint: let the body return it"));
    }
}

#[test]
fn results_must_be_as_what_goes_in() {
    let rig = Rig::new();
    let (x, go) = (rig.floats(), flag(&rig));
    let wrong = Err("results of the types that it is given");
    let is = |found: Result<Vec<Tensor>, &'static str>| found.map(|_| ()) == wrong;
    body(&rig, &[&x], |now| vec![rig.cast(&now[0], DType::S32)]);
    assert!(is(control(&rig, FOUR, &[&x])));
    body(&rig, &[&x], |now| vec![rig.neg(&now[0])]);
    body(&rig, &[&x], |now| vec![rig.cast(&now[0], DType::S32)]);
    assert!(is(control(&rig, Asked::Branch, &[&go, &x])));
    body(&rig, &[&x], |now| vec![rig.neg(&now[0])]);
    body(&rig, &[&x], |now| vec![rig.neg(&now[0])]);
    assert!(is(control(&rig, Asked::While, &[&x])), "a condition that is no flag");
    // None of it is left.
    let refusal = rig.stream().control("loop", FOUR, &[], rig.site(), &rig.engine.switches(), &|_, b| (7, b));
    assert!(matches!(refusal, Err(Refusal::Error(_))));
}

/// Records a body with dropout; gives what its op took.
fn with_dropout(rig: &Rig, x: &Tensor) -> Option<&'static str> {
    body(rig, &[x], |now| {
        let args = [now[0].arg(), common::float(0.5), ArgRef::None];
        let mut results = rig.dispatch(DROPOUT, &args).unwrap();
        match results.swap_remove(0) {
            Returned::New(tensor) => vec![tensor],
            other => panic!("{other:?}"),
        }
    })
}

#[test]
fn random_numbers_move_on_from_round_to_round() {
    let rig = Rig::new();
    let x = rig.floats();
    let taken = Blocks::default();
    let scan = |asked: Asked, operands: &[&Tensor]| {
        let refs: Vec<_> = operands.iter().map(|t| t.by_ref()).collect();
        let random = |_: Option<usize>, blocks: u64| {
            taken.borrow_mut().push(blocks);
            (7, 0)
        };
        let done = rig.stream().control("loop", asked, &refs, rig.site(), &rig.engine.switches(), &random);
        (tensors(done.unwrap().unwrap()), taken.take())
    };
    with_dropout(&rig, &x);
    let (out, blocks) = scan(FOUR, &[&x]);
    assert_eq!(blocks, [3], "the body took one block, and there are four rounds");
    assert_eq!(
        (out.len(), out[1].dtype, out[1].sizes.as_slice()),
        (2, DType::U64, &[2][..]),
        "the state before"
    );
    // The same numbers again: those of the generator are given back.
    with_dropout(&rig, &x);
    let again = Asked::Scan { length: 4, reverse: true, carried: 1, states: 1 };
    assert_eq!(scan(again, &[&x, &out[1]]).1, [1u64.wrapping_neg()]);
    // Both branches begin with the same.
    with_dropout(&rig, &x);
    body(&rig, &[&x], |now| vec![rig.neg(&now[0])]);
    assert_eq!(scan(Asked::Branch, &[&flag(&rig), &x]).1, [0]);
    // Nobody knows how many are needed.
    let go = flag(&rig);
    body(&rig, &[&go], |now| vec![now[0].clone()]);
    with_dropout(&rig, &x);
    assert!(control(&rig, Asked::While, &[&go]).is_err());
}
