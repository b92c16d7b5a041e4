//! Compiled graphs: what is noted while one is played, and recorded again in one call.

use std::sync::atomic::Ordering::Relaxed;

use common::{ADD, MUL, MUL_, RELU, Rig, Tensor, count_of, int, on_host, results, wrapped};
use oxitorch_engine::{ArgRef, Error, Home, Mode, Reason, Recipe, Site, Slot, TensorRef};
use oxitorch_hlo::DType;

mod common;

/// Plays a graph on these arguments; its results, and what was noted.
fn played(
    rig: &Rig,
    args: &[TensorRef<'_>],
    graph: impl FnOnce() -> Vec<Tensor>,
) -> (Vec<Tensor>, Option<Recipe>) {
    let switches = rig.engine.switches();
    assert!(rig.stream().watch(args, rig.site(), &switches).unwrap());
    let outputs = graph();
    let refs: Vec<TensorRef<'_>> = outputs.iter().map(Tensor::by_ref).collect();
    let recipe = rig.stream().watched(args, &refs, &switches).unwrap();
    (outputs, recipe)
}

/// Records by a recipe; the storages that it made.
fn replayed(rig: &Rig, recipe: &Recipe, args: &[TensorRef<'_>]) -> Option<Vec<Slot>> {
    let switches = rig.engine.switches();
    rig.stream().replay(recipe, args, rig.site(), &switches, &|_, blocks| (7, blocks)).unwrap()
}

/// `relu(-x) + w`, which nobody sees the middle of.
fn graph(rig: &Rig, x: &Tensor, w: &Tensor) -> Vec<Tensor> {
    let y = rig.relu(&rig.neg(x));
    vec![rig.add(&y, w)]
}

/// Reads a storage of four floats.
fn read(rig: &Rig, slot: Slot) -> Result<Vec<u8>, Error> {
    let tensor = Tensor { slot: slot.into(), ..Tensor::new(DType::F32, &[4]) };
    rig.read(&tensor)
}

#[test]
fn a_recipe_records_the_programs_that_playing_did() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let (outputs, recipe) = played(&rig, &[x.by_ref(), w.by_ref()], || graph(&rig, &x, &w));
    let recipe = recipe.unwrap();
    rig.read(&outputs[0]).unwrap();
    assert_eq!((rig.fake.programs().len(), results(&rig.fake.programs()[0])), (1, 1));
    // Other tensors of the kind.
    for _ in 0..3 {
        let (x, w) = (rig.floats(), rig.floats());
        let args = [x.by_ref(), w.by_ref()];
        let counts = rig.counts(|| {
            let made = replayed(&rig, &recipe, &args).unwrap();
            let [slot] = <[Slot; 1]>::try_from(made).unwrap();
            assert_eq!(read(&rig, slot).unwrap(), [1; 16]);
        });
        assert_eq!(counts, (0, 1));
    }
    let [output] = recipe.outputs() else { panic!() };
    assert_eq!((output.home(), output.layout()), (Home::Made(0), (DType::F32, &[4][..], &[1][..], 0, true)));
    let m = rig.metrics();
    assert_eq!((m.recipes.load(Relaxed), m.replays.load(Relaxed)), (1, 3));
}

#[test]
fn a_graph_goes_into_the_window_that_is_open() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let args = [x.by_ref(), w.by_ref()];
    let recipe = played(&rig, &args, || graph(&rig, &x, &w)).1.unwrap();
    rig.sync().unwrap();
    let programs = rig.compiled(|| {
        let before = rig.neg(&w);
        let made = replayed(&rig, &recipe, &args).unwrap();
        let after = rig.add(&before, &x);
        rig.cut(Reason::Step);
        drop((made, after));
    });
    let [program] = &programs[..] else { panic!("{programs:?}") };
    assert_eq!((count_of(program, "negate"), count_of(program, "add")), (2, 2), "{program}");
}

#[test]
fn no_window_ends_inside_a_graph() {
    let rig = Rig::new();
    rig.engine.set_window(Some(2), None, None);
    let (x, w) = (rig.floats(), rig.floats());
    let args = [x.by_ref(), w.by_ref()];
    let (outputs, recipe) = played(&rig, &args, || graph(&rig, &x, &w));
    assert!(recipe.is_some() && rig.metrics().flushes().is_empty());
    assert_eq!(replayed(&rig, &recipe.unwrap(), &args).map(|made| made.len()), Some(1));
    assert_eq!(rig.metrics().flushes()["ops"], 1, "before the next graph");
    drop(outputs);
}

#[test]
fn arguments_that_a_graph_writes_are_written_again() {
    let rig = Rig::new();
    let (state, w) = (rig.floats(), rig.floats());
    let args = [state.by_ref(), w.by_ref()];
    let (outputs, recipe) = played(&rig, &args, || {
        rig.dispatch(MUL_, &[state.arg(), w.arg()]).unwrap();
        vec![state.narrow(1, 2), rig.neg(&w)]
    });
    let recipe = recipe.unwrap();
    let homes: Vec<Home> = recipe.outputs().iter().map(|o| o.home()).collect();
    assert_eq!(homes, [Home::Argument(0), Home::Made(0)]);
    drop(outputs);
    rig.sync().unwrap();
    let donated = rig.metrics().donations.load(Relaxed);
    assert_eq!(rig.counts(|| drop(replayed(&rig, &recipe, &args))).1, 1, "the state has another value");
    assert_eq!(rig.metrics().donations.load(Relaxed), donated + 1, "in its own memory");
    // Two arguments in one storage: a write would reach both.
    let switches = rig.engine.switches();
    let both = [state.by_ref(), state.by_ref()];
    assert!(rig.stream().replay(&recipe, &both, rig.site(), &switches, &|_, _| (0, 0)).unwrap().is_none());
}

#[test]
fn numbers_of_a_graph_stay_and_those_of_arguments_do_not() {
    let rig = Rig::new();
    let x = rig.floats();
    let (half, two) = (0.5f64.to_le_bytes(), 2.0f64.to_le_bytes());
    let factor = wrapped(&two);
    let args = [x.by_ref(), factor.clone()];
    let (outputs, recipe) = played(&rig, &args, || {
        let y = rig.one(MUL, &[x.arg(), ArgRef::Tensor(wrapped(&half))]);
        vec![rig.one(MUL, &[y.arg(), ArgRef::Tensor(factor.clone())])]
    });
    let recipe = recipe.unwrap();
    drop(outputs);
    rig.sync().unwrap();
    let other = 3.0f64.to_le_bytes();
    let uploads = || rig.fake.calls("PJRT_Client_BufferFromHostBuffer");
    let first = |bytes: &[u8; 8]| {
        let before = uploads();
        let made = replayed(&rig, &recipe, &[x.by_ref(), wrapped(bytes)]).unwrap();
        rig.cut(Reason::Step);
        rig.sync().unwrap();
        drop(made);
        uploads() - before
    };
    assert_eq!(first(&other), 2, "both numbers are copied when they are first needed");
    assert_eq!(first(&other), 0);
    let again = 4.0f64.to_le_bytes();
    assert_eq!(first(&again), 1, "the number of the graph is there");
    assert_eq!(rig.fake.programs().len(), 1);
}

#[test]
fn random_numbers_are_drawn_in_each_call() {
    let rig = Rig::new();
    let x = rig.floats();
    let dropout = "native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)";
    let args = [x.by_ref()];
    let p = [
        ArgRef::Number(oxitorch_aten::args::Number::Float(0.5)),
        ArgRef::Number(oxitorch_aten::args::Number::Bool(true)),
    ];
    let (outputs, recipe) = played(&rig, &args, || {
        let call = [x.arg(), p[0].clone(), p[1].clone()];
        match rig.dispatch(dropout, &call).unwrap().swap_remove(0) {
            common::Returned::New(y) => vec![y],
            other => panic!("{other:?}"),
        }
    });
    let recipe = recipe.unwrap();
    let drawn = std::cell::Cell::new(0);
    let switches = rig.engine.switches();
    for calls in 1..4 {
        let random = |_: Option<usize>, blocks: u64| {
            drawn.set(drawn.get() + 1);
            assert!(blocks > 0);
            (9, drawn.get())
        };
        assert!(rig.stream().replay(&recipe, &args, rig.site(), &switches, &random).unwrap().is_some());
        assert_eq!(drawn.get(), calls);
    }
    drop(outputs);
}

#[test]
fn what_comes_from_elsewhere_spoils_a_recipe() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let args = [x.by_ref()];
    let bytes = [0; 4];
    let cases: [(&str, &dyn Fn() -> Vec<Tensor>); 4] = [
        ("a value that the host read", &|| {
            rig.read(&rig.neg(&x)).unwrap();
            vec![rig.relu(&x)]
        }),
        ("a tensor that is no argument", &|| vec![rig.add(&x, &w)]),
        ("a copy of host memory that is no argument", &|| {
            let y = rig.floats();
            vec![rig.add(&x, &y)]
        }),
        ("a number of the host that may change", &|| {
            let number = on_host(&bytes, DType::F32, &[], &[]);
            vec![rig.one(MUL, &[x.arg(), ArgRef::Tensor(number)])]
        }),
    ];
    for (what, graph) in cases {
        let (outputs, recipe) = played(&rig, &args, graph);
        assert!(recipe.is_none(), "{what}");
        assert!(rig.read(&outputs[0]).is_ok(), "{what}");
    }
    // And the next graph is not spoiled.
    assert!(played(&rig, &args, || vec![rig.relu(&x)]).1.is_some());
    // Arguments of which two have one value: an operand could be either.
    let copy = Tensor::new(DType::F32, &[4]);
    rig.copy(&x, &copy);
    assert!(played(&rig, &[x.by_ref(), copy.by_ref()], || vec![rig.add(&x, &copy)]).1.is_none());
}

#[test]
fn arguments_of_another_kind_are_refused() {
    let rig = Rig::new();
    let (x, w) = (rig.uploaded(DType::F32, &[4, 4], 1), rig.uploaded(DType::F32, &[4, 4], 1));
    let (outputs, recipe) = played(&rig, &[x.by_ref(), w.by_ref()], || graph(&rig, &x, &w));
    let recipe = recipe.unwrap();
    drop(outputs);
    rig.sync().unwrap();
    let like = |dtype, sizes: &[i64]| rig.uploaded(dtype, sizes, 1);
    let (size, dtype) = (like(DType::F32, &[4, 5]), like(DType::F64, &[4, 4]));
    let transposed = w.view(&[4, 4], &[1, 4], 0);
    let shifted = like(DType::F32, &[5, 4]).view(&[4, 4], &[4, 1], 4);
    // The same look at a storage whose value has another type.
    let flat = like(DType::F32, &[16]).view(&[4, 4], &[4, 1], 0);
    for other in [&size, &dtype, &transposed, &shifted, &flat] {
        assert!(replayed(&rig, &recipe, &[x.by_ref(), other.by_ref()]).is_none(), "{other:?}");
    }
    assert!(replayed(&rig, &recipe, &[x.by_ref()]).is_none());
    assert_eq!(rig.counts(|| ()), (0, 0), "nothing was recorded");
    // Other switches would lower the ops in another way.
    let mut double = rig.engine.switches();
    double.default_dtype = DType::F64;
    let args = [x.by_ref(), w.by_ref()];
    assert!(rig.stream().replay(&recipe, &args, rig.site(), &double, &|_, _| (0, 0)).unwrap().is_none());
    assert!(replayed(&rig, &recipe, &args).is_some());
    // A graph that writes nothing may be given one storage twice; two instead of one is another graph.
    assert!(replayed(&rig, &recipe, &[x.by_ref(), x.by_ref()]).is_some());
    let recipe = played(&rig, &[x.by_ref(), x.by_ref()], || graph(&rig, &x, &x)).1.unwrap();
    assert!(replayed(&rig, &recipe, &[w.by_ref(), w.by_ref()]).is_some());
    assert!(replayed(&rig, &recipe, &args).is_none());
}

#[test]
fn one_graph_is_played_at_a_time() {
    let rig = Rig::new();
    let x = rig.floats();
    let (args, switches) = ([x.by_ref()], rig.engine.switches());
    assert!(rig.stream().watch(&args, rig.site(), &switches).unwrap());
    assert!(!rig.stream().watch(&args, rig.site(), &switches).unwrap());
    // Another thread's ops are not noted, and end its windows as ever.
    let engine = &rig.engine;
    let theirs = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            assert!(!engine.stream(0).unwrap().watch(&args, Site(3), &switches).unwrap());
            common::dispatch(engine, ADD, &[x.arg(), x.arg(), int(1)])
        });
        other.join().unwrap()
    });
    let y = rig.one(RELU, &[x.arg()]);
    let recipe = rig.stream().watched(&args, &[y.by_ref()], &switches).unwrap().unwrap();
    rig.sync().unwrap();
    drop((theirs, y));
    let programs = rig.compiled(|| {
        let made = replayed(&rig, &recipe, &args).unwrap();
        rig.cut(Reason::Step);
        drop(made);
    });
    assert!(programs.iter().all(|p| count_of(p, "add") == 0), "{programs:?}");
    // A graph that ended with an error is given up.
    assert!(rig.stream().watch(&args, rig.site(), &switches).unwrap());
    rig.engine.unwatch().unwrap();
    assert!(rig.stream().watched(&args, &[], &switches).unwrap().is_none());
    assert!(rig.stream().watch(&args, rig.site(), &switches).unwrap());
}

#[test]
fn modes_treat_graphs_in_their_way() {
    let rig = Rig::new();
    let (x, w) = (rig.floats(), rig.floats());
    let args = [x.by_ref(), w.by_ref()];
    rig.mode(Mode::Debug);
    assert!(!rig.stream().watch(&args, rig.site(), &rig.engine.switches()).unwrap(), "each op is looked at");
    rig.mode(Mode::Strict);
    let mut outcome = None;
    let counts = rig.counts(|| outcome = Some(played(&rig, &args, || graph(&rig, &x, &w))));
    assert_eq!(counts, (1, 1), "a graph is a unit");
    let recipe = outcome.unwrap().1.unwrap();
    assert_eq!(rig.counts(|| drop(replayed(&rig, &recipe, &args))), (0, 1));
    assert_eq!(rig.metrics().flushes()["mode"], 2);
    rig.mode(Mode::Debug);
    assert!(replayed(&rig, &recipe, &args).is_none());
}
