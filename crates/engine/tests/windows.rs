//! Where windows end, and what of them is launched.

use common::{NEG, RELU, Rig, SUM, Tensor, count_of, results};
use oxitorch_engine::{ArgRef, Limits, Mode, Reason, Site};
use oxitorch_hlo::DType;
use oxitorch_pjrt::OptionValue;

mod common;

/// The reasons for which windows ended in `f`.
fn reasons(rig: &Rig, f: impl FnOnce()) -> Vec<(&'static str, u64)> {
    rig.flushes(f).into_iter().collect()
}

#[test]
fn a_read_and_a_wait_end_a_window() {
    let rig = Rig::new();
    let x = rig.floats();
    let y = rig.neg(&rig.relu(&x));
    assert_eq!(reasons(&rig, || drop(rig.read(&y))), [("read", 1)]);
    let kept = rig.neg(&x);
    assert_eq!(reasons(&rig, || rig.sync().unwrap()), [("wait", 1)]);
    let also = rig.relu(&kept);
    assert_eq!(reasons(&rig, || assert!(rig.stream().mark(rig.site()).is_ok())), [("wait", 1)]);
    let last = rig.relu(&also);
    assert_eq!(reasons(&rig, || drop(rig.stream().is_idle(rig.site()))), [("wait", 1)]);
    // What was read and what was copied there are known: no window ends for them.
    assert_eq!(reasons(&rig, || drop((rig.read(&last), rig.read(&x)))), []);
}

#[test]
fn a_step_ends_a_window_and_so_does_a_barrier() {
    let rig = Rig::new();
    let x = rig.floats();
    for (reason, name) in [(Reason::Step, "step"), (Reason::Barrier, "barrier")] {
        let _y = rig.neg(&x);
        assert_eq!(reasons(&rig, || rig.cut(reason)), [(name, 1)]);
        assert_eq!(reasons(&rig, || rig.cut(reason)), [], "nothing is recorded");
    }
}

#[test]
fn a_step_whose_gradients_may_be_dropped_waits_for_what_comes_next() {
    let rig = Rig::new();
    let x = rig.floats();
    let step = |may_drop| rig.stream().step(may_drop, rig.site()).unwrap();
    let dropped = || rig.stream().dropped_gradients(rig.site()).unwrap();
    let mut kept = rig.neg(&x);
    assert_eq!(reasons(&rig, || assert!(!step(false))), [("step", 1)]);
    assert_eq!(reasons(&rig, || assert!(!step(true))), [], "nothing is recorded");
    let gradient = rig.neg(&kept);
    kept = rig.relu(&gradient);
    assert_eq!(reasons(&rig, || assert!(step(true))), []);
    drop(gradient);
    assert_eq!(reasons(&rig, || assert!(dropped())), [("step", 1)]);
    assert_eq!(reasons(&rig, || assert!(!dropped())), []);
    rig.sync().unwrap();
    assert_eq!(results(rig.fake.programs().last().unwrap()), 1, "the gradient is none");
    // Whatever else comes is behind the step.
    let copy = |_: &Tensor| Some(rig.floats());
    let op = |y: &Tensor| Some(rig.neg(y));
    let read = |y: &Tensor| rig.read(y).ok().and(None);
    let wait = |_: &Tensor| rig.sync().ok().and(None);
    let another = |_: &Tensor| (!step(true)).then_some(()).and(None);
    type Next<'a> = &'a dyn Fn(&Tensor) -> Option<Tensor>;
    let others: [(&str, Next); 5] =
        [("an op", &op), ("a read", &read), ("a copy", &copy), ("a wait", &wait), ("a step", &another)];
    for (what, f) in others {
        kept = rig.neg(&kept);
        assert_eq!(reasons(&rig, || assert!(step(true))), [], "{what}");
        let mut result = None;
        assert_eq!(reasons(&rig, || result = f(&kept)), [("step", 1)], "{what}");
        assert_eq!(reasons(&rig, || assert!(!dropped())), [], "{what}");
        rig.sync().unwrap();
    }
}

#[test]
fn a_loop_that_comes_round_ends_a_window_if_it_is_worth_a_launch() {
    // So many ops in a round, and rounds until the window ends.
    for (ops, rounds) in [(64, 1), (100, 1), (33, 2), (16, 4), (7, 10)] {
        let rig = Rig::new();
        let x = rig.floats();
        let mut y = x.clone();
        let ended = reasons(&rig, || (0..rounds).for_each(|_| y = rig.chain(&y, ops, 10)));
        assert_eq!(ended, [], "{ops}");
        let ended = reasons(&rig, || y = rig.chain(&y, 1, 10));
        assert_eq!(ended, [("loop", 1)], "{ops}");
    }
    // Lines that nobody knows are no loop.
    let rig = Rig::new();
    let mut y = rig.floats();
    assert_eq!(reasons(&rig, || (0..200).for_each(|_| y = rig.neg(&y))), []);
}

#[test]
fn a_copy_from_the_host_that_comes_again_ends_a_window() {
    let rig = Rig::new();
    let mut kept = rig.floats();
    rig.sync().unwrap();
    // Each round's ops have lines of their own: only the copy says that it is a loop.
    let mut round = |ops: u32, first: u32| {
        let x = rig.at(5).floats();
        kept = rig.chain(&x, ops, first);
    };
    let ended: Vec<_> =
        (1..6).map(|i| reasons(&rig, || round(if i < 4 { 70 } else { 10 }, 1000 * i))).collect();
    let a_loop = vec![("loop", 1)];
    // Every round of 70 ops ends when the copy comes again; those of 10 ops share a window.
    assert_eq!(ended, [vec![], a_loop.clone(), a_loop.clone(), a_loop, vec![]]);
}

#[test]
fn bounds_end_windows_where_they_did_in_the_round_before() {
    let rig = Rig::new();
    rig.engine.set_window(Some(30), None, None);
    let x = rig.floats();
    let mut y = rig.chain(&x, 1, 1);
    let rounds: Vec<_> = (0..4)
        .map(|_| {
            let mut ended = vec![];
            let counts = rig.counts(|| ended = reasons(&rig, || y = rig.chain(&y, 100, 10)));
            (ended, counts.0)
        })
        .collect();
    // 30, 30, 30 and the rest, which the wait of `counts` launches: the same in each round.
    assert!(rounds.iter().all(|(ended, _)| *ended == [("ops", 3)]), "{rounds:?}");
    assert!(rounds[2..].iter().all(|(_, compiles)| *compiles == 0), "{rounds:?}");
}

#[test]
fn a_round_that_bounds_cut_ends_where_it_began() {
    let rig = Rig::new();
    rig.engine.set_window(Some(30), None, None);
    let mut y = rig.floats();
    let round = |y: &Tensor| rig.chain(y, 100, 10);
    y = round(&y);
    let ended = reasons(&rig, || y = round(&y));
    assert_eq!(ended, [("loop", 1), ("ops", 3)], "the rest of a round does not go on in the next");
    let mut compiles = 0;
    rig.sync().unwrap();
    let before = rig.fake.programs().len();
    for _ in 0..3 {
        y = round(&y);
        compiles = rig.fake.programs().len() - before;
    }
    rig.sync().unwrap();
    assert!(compiles <= 1, "{compiles}");
}

#[test]
fn bytes_end_windows() {
    let rig = Rig::new();
    let small = rig.floats();
    let large = rig.uploaded(DType::F32, &[1024], 1);
    rig.engine.set_window(None, Some(16 * 1024), None);
    let mut kept = vec![small.clone()];
    assert_eq!(reasons(&rig, || (0..100).for_each(|_| kept.push(rig.neg(&small)))), []);
    rig.sync().unwrap();
    // 4 KiB each: the window is full after four.
    assert_eq!(reasons(&rig, || (0..9).for_each(|_| kept.push(rig.neg(&large)))), [("bytes", 2)]);
    rig.sync().unwrap();
    // Of what XLA fuses nothing counts against the other bound.
    rig.engine.set_window(None, None, Some(16 * 1024));
    assert_eq!(reasons(&rig, || (0..9).for_each(|_| kept.push(rig.neg(&large)))), []);
    assert_eq!(rig.engine.window(), Limits { kept: 16 * 1024, ..rig.stream().default_limits() });
}

#[test]
fn a_window_ends_when_it_alone_holds_too_much() {
    let rig = Rig::new();
    let limits = rig.stream().default_limits();
    rig.stream().set_limits(Limits { held: 16 * 1024, ..limits });
    let large = || rig.uploaded(DType::F32, &[1024], 1);
    let sum = |x: &Tensor| rig.one(SUM, &[x.arg(), ArgRef::None]);
    let (mut kept, mut seen): (Vec<Tensor>, Vec<Tensor>) = (vec![], vec![]);
    // 4 KiB each that nobody sees any more: the window ends before the copy that comes next, or later before an op.
    let ended = reasons(&rig, || (0..5).for_each(|_| kept.push(sum(&large()))));
    assert_eq!(ended, [("bytes", 2)]);
    rig.sync().unwrap();
    seen.extend((0..14).map(|_| large()));
    assert_eq!(reasons(&rig, || seen.drain(..).for_each(|x| kept.push(sum(&x)))), [("bytes", 2)]);
    rig.sync().unwrap();
    // What somebody sees is there anyway, and what a result replaces is given to it.
    seen.extend((0..9).map(|_| large()));
    assert_eq!(reasons(&rig, || seen.iter().for_each(|x| kept.push(sum(x)))), []);
    assert_eq!(reasons(&rig, || seen.iter_mut().for_each(|x| *x = rig.neg(x))), []);
    rig.sync().unwrap();
}

#[test]
fn other_compiler_options_end_a_window() {
    let rig = Rig::new();
    let x = rig.floats();
    let options = vec![("some_option".to_owned(), OptionValue::Bool(true))];
    let number = rig.engine.compiler_options(options.clone());
    assert_eq!(rig.engine.compiler_options(options), number, "equal options are one");
    let y = rig.neg(&x);
    rig.engine.set_switches(|s| s.compiler_options = number);
    let mut z = None;
    assert_eq!(reasons(&rig, || z = Some(rig.neg(&y))), [("options", 1)]);
    rig.engine.set_switches(|s| s.compiler_options = 0);
    let mut w = None;
    assert_eq!(reasons(&rig, || w = Some(rig.neg(&y))), [("options", 1)]);
    rig.sync().unwrap();
    // The same op, compiled for other options.
    assert_eq!(rig.fake.compiled_with("some_option"), [false, true]);
}

#[test]
fn modes_without_windows_launch_each_op() {
    for mode in [Mode::Strict, Mode::Debug] {
        let rig = Rig::new();
        rig.mode(mode);
        let x = rig.floats();
        let mut y = x.clone();
        let ended = reasons(&rig, || y = rig.relu(&rig.neg(&rig.relu(&x))));
        assert_eq!(ended, [("mode", 3)], "{mode:?}");
        let counts = rig.counts(|| y = rig.relu(&rig.neg(&rig.relu(&x))));
        assert_eq!(counts, (0, 3), "{mode:?}: nothing new");
        assert_eq!(rig.fake.programs().len(), 2, "{mode:?}: relu and neg");
        drop(y);
    }
}

#[test]
fn debug_mode_waits_for_each_op() {
    let rig = Rig::new();
    rig.mode(Mode::Debug);
    let x = rig.floats();
    rig.fake.fail_values(13, "the chip is on fire");
    let e = rig.at(12).dispatch(NEG, &[x.arg()]).map(drop).map_err(common::error).unwrap_err();
    assert!(e.message.contains("the chip is on fire"), "{e}");
    rig.fake.heal_values();
    assert!(rig.sync().is_ok(), "the failure was seen");
}

#[test]
fn what_nobody_sees_is_left_out() {
    let rig = Rig::new();
    let x = rig.floats();
    let programs = rig.compiled(|| {
        let a = rig.neg(&x);
        let b = rig.relu(&a);
        drop(rig.add(&b, &x)); // nobody sees it
        let c = rig.add(&a, &a);
        drop(a); // `c` needs it, and nobody sees it
        drop(b);
        let read = rig.read(&c);
        assert!(read.is_ok());
    });
    let [program] = &programs[..] else { panic!("{programs:?}") };
    assert_eq!((count_of(program, "negate"), count_of(program, "maximum")), (1, 0), "{program}");
    assert_eq!(results(program), 1, "{program}");
    // A window of which nobody sees anything is no program.
    assert_eq!(rig.counts(|| drop(rig.neg(&rig.relu(&x)))), (0, 0));
}

#[test]
fn overwritten_values_are_left_out() {
    let rig = Rig::new();
    let x = rig.floats();
    let y = rig.floats();
    let programs = rig.compiled(|| {
        for _ in 0..3 {
            rig.copy(&rig.neg(&x), &y);
        }
    });
    let [program] = &programs[..] else { panic!("{programs:?}") };
    assert_eq!((count_of(program, "negate"), results(program)), (1, 1), "{program}");
}

#[test]
fn a_thread_ends_its_own_window_only() {
    let rig = Rig::new();
    let x = rig.floats();
    let mine = rig.neg(&x);
    let (engine, x) = (&rig.engine, &x);
    let launches = || rig.fake.calls("PJRT_LoadedExecutable_Execute");
    // Another thread reads, and ends a step.
    let read = |y: &Tensor| engine.stream(0).unwrap().read_host(&y.by_ref(), &mut [0; 16], Site(2)).unwrap();
    let step = |_: &Tensor| engine.stream(0).unwrap().cut(Reason::Step, Site(2)).unwrap();
    for (count, end) in [(1, &read as &(dyn Fn(&Tensor) + Sync)), (2, &step)] {
        let other = || {
            let y = common::dispatch(engine, RELU, &[x.arg()]);
            end(&y);
            y
        };
        let theirs = std::thread::scope(|scope| scope.spawn(other).join().unwrap());
        common::eventually("the launch", || launches() == count);
        drop(theirs);
    }
    let programs = rig.fake.programs();
    assert!(programs.iter().all(|p| count_of(p, "negate") == 0), "`neg` of this thread stays recorded");
    rig.read(&mine).unwrap();
    assert_eq!(launches(), 3);
}

#[test]
fn who_needs_another_threads_value_launches_that() {
    let rig = Rig::new();
    let x = rig.floats();
    let y = rig.neg(&x);
    let z = rig.relu(&x);
    let engine = &rig.engine;
    std::thread::scope(|scope| {
        let read = || engine.stream(0).unwrap().read_host(&y.by_ref(), &mut [0; 16], Site(2));
        scope.spawn(read).join().unwrap().unwrap();
    });
    assert_eq!(rig.fake.calls("PJRT_LoadedExecutable_Execute"), 1);
    let program = &rig.fake.programs()[0];
    assert_eq!((count_of(program, "negate"), count_of(program, "maximum")), (1, 0), "{program}");
    rig.read(&z).unwrap();
    assert_eq!(rig.fake.calls("PJRT_LoadedExecutable_Execute"), 2);
}

#[test]
fn who_waits_for_the_device_launches_what_all_recorded() {
    let rig = Rig::new();
    let x = rig.floats();
    let y = rig.add(&x, &x);
    let engine = &rig.engine;
    std::thread::scope(|scope| {
        scope.spawn(|| engine.stream(0).unwrap().synchronize(Site(3))).join().unwrap().unwrap();
    });
    assert_eq!(rig.fake.calls("PJRT_LoadedExecutable_Execute"), 1);
    drop(y);
}
