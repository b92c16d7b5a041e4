//! Which inputs are given to a program for its results.

use std::sync::atomic::Ordering::Relaxed;

use common::{ADD, MUL_, RELU_, Rig, Tensor, donors, int, wrapped};
use oxitorch_engine::{ArgRef, Reason, Site};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

/// The program that the window is launched as: how many inputs it takes, and which it may overwrite.
fn launched(rig: &Rig, f: impl FnOnce()) -> (usize, Vec<usize>) {
    let programs = rig.compiled(f);
    let [program] = &programs[..] else { panic!("{programs:?}") };
    donors(program)
}

/// How many inputs were given away, and their bytes.
fn given(rig: &Rig) -> (u64, u64) {
    rig.sync().unwrap();
    (rig.metrics().donations.load(Relaxed), rig.metrics().bytes_donated.load(Relaxed))
}

#[test]
fn an_input_that_nobody_sees_is_given_away() {
    let rig = Rig::new();
    let x = rig.floats();
    let mut y = None;
    let program = launched(&rig, || {
        y = Some(rig.neg(&x));
        drop(x);
    });
    assert_eq!(program, (1, vec![0]));
    assert_eq!(given(&rig), (1, 16));
    assert_eq!(rig.fake.live()["buffer"], 1, "the memory is one");
    assert_eq!(rig.bytes(), 16);
}

#[test]
fn what_somebody_sees_stays() {
    let rig = Rig::new();
    let x = rig.floats();
    let seen_by_a_view = rig.floats();
    let also = seen_by_a_view.narrow(0, 2);
    let mut kept = vec![];
    assert_eq!(launched(&rig, || kept.push(rig.neg(&x))), (1, vec![]));
    kept.clear();
    let program = launched(&rig, || {
        kept.push(rig.relu(&seen_by_a_view));
        drop(seen_by_a_view);
    });
    assert_eq!(program, (1, vec![]), "a view looks at the whole storage");
    assert_eq!(given(&rig), (0, 0));
    assert_eq!((rig.read(&x).unwrap(), rig.read(&also).unwrap()), (vec![1; 16], vec![1; 8]));
}

#[test]
fn two_tensors_with_one_value_keep_it() {
    let rig = Rig::new();
    let (x, copy) = (rig.floats(), Tensor::new(DType::F32, &[4]));
    rig.copy(&x, &copy);
    let mut kept = None;
    let program = launched(&rig, || {
        kept = Some(rig.neg(&x));
        drop(x);
    });
    assert_eq!(program, (1, vec![]), "the copy shares the value");
    assert_eq!(rig.read(&copy).unwrap(), [1; 16]);
}

#[test]
fn only_what_a_result_fits_into_is_given_away() {
    // The dtypes of an input and of its result, and whether the memory of one is the other's.
    let fits = [
        (DType::F32, DType::S32, true),
        (DType::F64, DType::S64, true),
        (DType::F32, DType::F64, false),
        (DType::F64, DType::F32, false),
    ];
    for (from, to, fits) in fits {
        let rig = Rig::new();
        let x = rig.uploaded(from, &[4], 1);
        let mut y = None;
        let program = launched(&rig, || {
            y = Some(rig.cast(&x, to));
            drop(x);
        });
        assert_eq!(program, (1, if fits { vec![0] } else { vec![] }), "{from:?} {to:?}");
        assert_eq!(given(&rig).0, u64::from(fits));
        assert_eq!(rig.bytes(), 4 * to.size_bytes() as u64, "what was not given away is let go of");
    }
}

#[test]
fn each_result_takes_one_input() {
    let rig = Rig::new();
    let (x, y) = (rig.floats(), rig.floats());
    let mut kept = vec![];
    let program = launched(&rig, || {
        kept.push(rig.add(&x, &y));
        drop((x, y));
    });
    assert_eq!(program, (2, vec![0]), "one result");
    let (x, y) = (rig.floats(), rig.floats());
    let program = launched(&rig, || {
        kept.extend([rig.neg(&x), rig.relu(&y)]);
        drop((x, y));
    });
    assert_eq!(program, (2, vec![0, 1]), "two results");
    assert_eq!(given(&rig), (3, 48));
}

#[test]
fn the_compiler_is_told_which_result_an_input_becomes() {
    let rig = Rig::new();
    let (x, y) = (rig.floats(), rig.floats());
    let mut kept = vec![];
    let programs = rig.compiled(|| {
        kept.extend([rig.neg(&x), rig.cast(&y, DType::S32)]);
        drop((x, y));
    });
    let main = programs[0].split_once("@main(").unwrap().1.lines().next().unwrap();
    let params: Vec<&str> = main.split("%arg").skip(1).take(2).collect();
    assert!(params[0].contains("tf.aliasing_output = 0"), "{main}");
    // Another type: which memory that takes is the compiler's choice.
    assert!(params[1].contains("jax.buffer_donor"), "{main}");
}

#[test]
fn weights_are_updated_in_their_own_memory() {
    let rig = Rig::new();
    let weight = rig.floats();
    let rate = 0.9f64.to_le_bytes();
    let step = || {
        rig.dispatch(MUL_, &[weight.arg(), ArgRef::Tensor(wrapped(&rate))]).unwrap();
        rig.cut(Reason::Step);
    };
    step();
    rig.sync().unwrap();
    rig.stream().memory().reset_peak();
    let before = given(&rig).0;
    assert_eq!(rig.counts(|| (0..10).for_each(|_| step())), (0, 10));
    assert_eq!(given(&rig).0 - before, 10);
    let bytes = rig.stream().memory().bytes();
    assert_eq!(bytes.current, 16);
    assert!(bytes.peak <= 32, "{bytes:?}");
    // Somebody looks at the weight of before: that step writes elsewhere.
    let old = Tensor::new(DType::F32, &[4]);
    rig.copy(&weight, &old);
    step();
    assert_eq!(given(&rig).0 - before, 10);
    assert_eq!(rig.bytes(), 32);
    assert!(rig.read(&old).is_ok());
}

#[test]
fn a_program_that_would_overwrite_more_is_told_what_to_keep() {
    let rig = Rig::new();
    let step = |keep: bool| {
        let x = rig.floats();
        let y = rig.at(1).neg(&x);
        let kept = keep.then_some(x);
        rig.at(2).cut(Reason::Step);
        rig.sync().unwrap();
        let read = kept.map(|x| rig.read(&x).unwrap());
        drop(y);
        read
    };
    assert_eq!(step(false), None);
    assert_eq!(step(false), None); // a loop
    assert_eq!(given(&rig), (2, 32));
    // The program with the donor stands in, and leaves the input alone.
    assert_eq!(step(true), Some(vec![1; 16]));
    assert_eq!((given(&rig), rig.fake.programs().len()), ((2, 32), 1));
    assert_eq!(step(true), Some(vec![1; 16]));
    assert_eq!(rig.fake.programs().len(), 2, "it comes again and again: a program of its own");
    assert_eq!(donors(&rig.fake.programs()[1]), (1, vec![]));
}

#[test]
fn what_a_later_part_needs_is_not_given_away() {
    let rig = Rig::new();
    // Too long for one program. The first part takes the bias alone, and its result would fit there.
    let bias = rig.floats();
    let mut y = rig.neg(&bias);
    for _ in 0..400 {
        y = (0..4).fold(rig.add(&y, &bias), |y, _| rig.relu(&y));
    }
    drop(bias);
    assert!(rig.read(&y).is_ok());
    rig.sync().unwrap();
    assert_eq!(rig.metrics().splits.load(Relaxed), 1);
    let parts = rig.metrics().launches.load(Relaxed);
    assert!(parts > 3);
    // Each part but the first overwrites what the one before made.
    assert_eq!((given(&rig).0, rig.bytes()), (parts - 1, 16));
}

#[test]
fn what_another_thread_still_needs_is_not_given_away() {
    let rig = Rig::new();
    let x = rig.floats();
    let mine = rig.neg(&x);
    let engine = &rig.engine;
    let sum = std::thread::scope(|scope| {
        let read = || {
            let result = common::dispatch(engine, ADD, &[x.arg(), x.arg(), int(1)]);
            engine.stream(0).unwrap().read_host(&result.by_ref(), &mut [0; 16], Site(2)).unwrap();
            result
        };
        scope.spawn(read).join().unwrap()
    });
    drop(x); // `mine` is recorded and needs it
    assert_eq!(donors(&rig.fake.programs()[0]), (1, vec![]));
    assert_eq!(rig.read(&mine).unwrap(), [1; 16]);
    assert_eq!(donors(&rig.fake.programs()[1]), (1, vec![0]));
    drop(sum);
}

#[test]
fn what_is_on_the_host_is_not_given_away() {
    let rig = Rig::new();
    // A number has the bytes of a result, and stays for the next program that wants it.
    let x = rig.uploaded(DType::F64, &[], 1);
    let number = 2.5f64.to_le_bytes();
    let mut kept = vec![];
    let mut add = || kept.push(rig.one(ADD, &[x.arg(), ArgRef::Tensor(wrapped(&number)), int(1)]));
    let program = launched(&rig, &mut add);
    assert_eq!(program.1, Vec::<usize>::new());
    assert_eq!(rig.counts(&mut add), (0, 1));
}

#[test]
fn in_place_ops_on_views_overwrite_the_storage() {
    for platform in [Platform::Tpu, Platform::Cpu] {
        let rig = Rig::on(FakePlugin::new(), platform);
        let x = rig.uploaded(DType::F32, &[8], 1);
        let half = x.narrow(4, 4);
        let program = launched(&rig, || drop(rig.dispatch(RELU_, &[half.arg()]).unwrap()));
        assert_eq!(program, (1, vec![0]), "{platform}");
        assert_eq!(rig.bytes(), 32);
    }
}
