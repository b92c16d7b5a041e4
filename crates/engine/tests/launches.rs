//! What a device does late or refuses, on the fake plugin: waits, failures, and who loses what.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{HERE, RELU, Rig, Tensor, dispatch, eventually, options};
use oxitorch_engine::{ErrorKind, Mode, Options, Reason};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

/// Launches an op whose result nobody keeps.
fn launch_and_forget(rig: &Rig) {
    rig.mode(Mode::Strict);
    drop(rig.cast(&rig.floats(), DType::F64));
    rig.mode(Mode::Fused);
}

/// The kind of error that reading a tensor gives.
fn read(rig: &Rig, tensor: &Tensor) -> Result<Vec<u8>, ErrorKind> {
    rig.read(tensor).map_err(|e| e.kind)
}

#[test]
fn waits_are_for_what_was_launched_and_not_for_what_is_still_wanted() {
    let rig = Rig::new();
    let (fake, stream) = (&rig.fake, rig.stream());
    fake.hold();
    launch_and_forget(&rig);
    eventually("the launch", || fake.calls("PJRT_LoadedExecutable_Execute") > 0);
    assert!(!stream.is_idle(HERE).unwrap());
    let mark = stream.mark(HERE).unwrap();
    let released = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let synchronized = scope.spawn(|| stream.synchronize(HERE).map(|()| released.load(Ordering::SeqCst)));
        let waited = scope.spawn(|| stream.wait(&mark).map(|()| released.load(Ordering::SeqCst)));
        std::thread::sleep(Duration::from_millis(100));
        assert!(mark.time().is_none());
        released.store(true, Ordering::SeqCst);
        fake.release();
        assert!(synchronized.join().unwrap().unwrap() && waited.join().unwrap().unwrap());
    });
    assert!(mark.time().is_some() && stream.is_idle(HERE).unwrap());
}

#[test]
fn a_note_launches_nothing_and_nobody_waits_for_it_who_does_not_ask() {
    let rig = Rig::new();
    let (fake, stream) = (&rig.fake, rig.stream());
    let executed = || fake.calls("PJRT_LoadedExecutable_Execute");
    let before = stream.note(HERE);
    eventually("an idle device is there", || before.time().is_some());
    fake.hold();
    let x = rig.neg(&rig.floats());
    let within = stream.note(HERE);
    let y = rig.relu(&x);
    stream.wait(&within).unwrap(); // what it is in is not launched
    assert_eq!((executed(), within.time()), (0, None));
    stream.cut(Reason::Step, HERE).unwrap();
    let after = stream.note(HERE);
    // Behind it goes on.
    launch_and_forget(&rig);
    eventually("the launches", || executed() == 2);
    assert!(within.time().is_none() && after.time().is_none());
    std::thread::sleep(Duration::from_millis(80));
    fake.release();
    stream.wait(&after).unwrap();
    stream.wait(&within).unwrap();
    let [before, within, after] = [before, within, after].map(|mark| mark.time().unwrap());
    assert!(before <= within && within <= after);
    // One of two ops is behind it, of a program that ran for so long.
    assert!(after - within >= Duration::from_millis(30), "{:?}", after - within);
    drop(y);
}

#[test]
fn a_note_in_a_launch_that_fails_is_never_reached() {
    let rig = Rig::new();
    let stream = rig.stream();
    let x = rig.neg(&rig.floats());
    let mark = stream.note(HERE);
    rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "the chip is on fire");
    stream.cut(Reason::Step, HERE).unwrap();
    stream.wait(&mark).unwrap();
    assert!(mark.time().is_none());
    assert!(read(&rig, &x).is_err());
    // Nobody wants what is before it: nothing is launched, and it is reached all the same.
    drop(rig.neg(&rig.floats()));
    let mark = stream.note(HERE);
    stream.cut(Reason::Step, HERE).unwrap();
    stream.wait(&mark).unwrap();
    assert!(mark.time().is_some());
}

#[test]
fn notes_of_threads_are_in_what_each_of_them_launches() {
    let rig = Rig::new();
    let stream = rig.stream();
    let x = rig.floats();
    let y = rig.neg(&x);
    let own = stream.note(HERE);
    let (engine, arg) = (&rig.engine, &x);
    let other = || {
        let stream = engine.stream(0).unwrap();
        let y = dispatch(engine, RELU, &[arg.arg()]);
        let mark = stream.note(HERE);
        stream.cut(Reason::Step, HERE).unwrap();
        stream.wait(&mark).unwrap();
        (y, mark.time())
    };
    let (_, reached) = std::thread::scope(|scope| scope.spawn(other).join().unwrap());
    assert!(reached.is_some());
    stream.wait(&own).unwrap();
    assert!(own.time().is_none()); // is still recorded
    stream.cut(Reason::Wait, HERE).unwrap();
    stream.wait(&own).unwrap();
    assert!(own.time().is_some());
    drop(y);
}

#[test]
fn launches_in_flight_are_bounded_whether_or_not_their_results_are_wanted() {
    let rig = Rig::new();
    let (fake, stream) = (&rig.fake, rig.stream());
    launch_and_forget(&rig); // compiles
    stream.synchronize(HERE).unwrap();
    let before = fake.calls("PJRT_LoadedExecutable_Execute");
    fake.hold();
    (0..60).for_each(|_| launch_and_forget(&rig));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(
        fake.calls("PJRT_LoadedExecutable_Execute") - before,
        33,
        "32, and one that waits for its turn"
    );
    fake.release();
    stream.synchronize(HERE).unwrap();
    assert_eq!(fake.calls("PJRT_LoadedExecutable_Execute") - before, 60);
}

#[test]
fn what_fails_on_the_device_is_raised_once() {
    let rig = Rig::new();
    let (fake, stream) = (&rig.fake, rig.stream());
    for late in [false, true] {
        if late {
            fake.hold();
        }
        fake.fail_values(13, "the chip is on fire");
        launch_and_forget(&rig);
        while !late && !stream.is_idle(HERE).unwrap() {}
        std::thread::sleep(Duration::from_millis(20)); // the launch is on its way
        fake.release();
        let e = stream.synchronize(HERE).unwrap_err();
        assert!(e.message.contains("copy") && e.message.contains("the chip is on fire"), "{late}: {e}");
        fake.heal_values();
        stream.synchronize(HERE).unwrap();
    }
}

#[test]
fn inputs_are_given_away_when_the_launch_is_accepted() {
    let rig = Rig::new();
    let (fake, stream) = (&rig.fake, rig.stream());
    let x = rig.uploaded(DType::F32, &[4], 7);
    let y = rig.cast(&x, DType::S32);
    let z = rig.cast(&y, DType::F64);
    drop(x); // its memory is for `y`
    fake.fail_once("PJRT_LoadedExecutable_Execute", 8, "no room");
    stream.cut(Reason::Wait, HERE).unwrap();
    // Both ops run by themselves.
    assert_eq!(read(&rig, &y).unwrap(), [7; 16]);
    assert!(read(&rig, &z).is_ok());
    stream.synchronize(HERE).unwrap();
    assert_eq!(fake.calls("PJRT_LoadedExecutable_Execute"), 3);
}

#[test]
fn memory_is_counted_with_its_padding() {
    let rig = Rig::on(FakePlugin::new().tile(4096), Platform::Tpu);
    let stream = rig.stream();
    let x = rig.floats();
    stream.synchronize(HERE).unwrap();
    let before = stream.memory().bytes().current;
    rig.mode(Mode::Strict);
    let y = rig.cast(&x, DType::F64);
    stream.synchronize(HERE).unwrap();
    assert_eq!(stream.memory().bytes().current - before, 4096);
    drop(y);
    stream.synchronize(HERE).unwrap();
    assert_eq!(stream.memory().bytes().current, before);
}

#[test]
fn what_fits_survives_what_does_not() {
    let rig = Rig::new();
    let (fake, stream) = (&rig.fake, rig.stream());
    let memory = stream.memory();
    let x = rig.floats();
    stream.synchronize(HERE).unwrap();
    let room = |bytes: u64| {
        memory.set_fraction(1.0);
        memory.set_fraction((memory.bytes().current + bytes) as f64 / memory.total() as f64);
    };
    room(56);
    // 16, 32 and 32 bytes in one window.
    let a = rig.cast(&x, DType::S32);
    let b = rig.cast(&x, DType::F64);
    let c = rig.cast(&x, DType::S64);
    stream.cut(Reason::Wait, HERE).unwrap();
    assert_eq!(read(&rig, &c), Err(ErrorKind::OutOfMemory));
    assert!(read(&rig, &a).is_ok() && read(&rig, &b).is_ok());
    stream.synchronize(HERE).unwrap(); // the failure was seen
    // A copy from the host waits for what holds memory that nobody wants, before it gives up.
    drop(b);
    fake.hold();
    rig.mode(Mode::Strict);
    let big = rig.cast(&x, DType::F64);
    drop(big);
    fake.release();
    let again = rig.uploaded(DType::F32, &[4], 2);
    assert!(read(&rig, &again).is_ok());
}

#[test]
fn deterministic_algorithms_are_asked_of_the_compiler_for_gpus() {
    static WANTED: AtomicBool = AtomicBool::new(false);
    for platform in [Platform::Cuda, Platform::Tpu] {
        let options = Options { deterministic: || WANTED.load(Ordering::SeqCst), ..options() };
        let rig = Rig::with(FakePlugin::new(), platform, &options);
        // The same op each time; what it was compiled for before is not run where the switch says otherwise.
        for wanted in [false, true, true, false] {
            WANTED.store(wanted, Ordering::SeqCst);
            launch_and_forget(&rig);
            rig.sync().unwrap();
        }
        let compiled = rig.fake.compiled_with("xla_gpu_deterministic_ops");
        let expected: &[bool] = if platform == Platform::Cuda { &[false, true] } else { &[false] };
        assert_eq!(compiled, expected, "{platform}");
    }
}
