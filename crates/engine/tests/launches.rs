//! What a device does late or refuses, on the fake plugin: waits, failures, and who loses what.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oxitorch_aten::TargetOptions;
use oxitorch_engine::{
    CacheOptions, Engine, ErrorKind, Mode, Options, Place, Reason, Site, Slot, Stream, Target, TensorRef,
};
use oxitorch_hlo::DType;
use oxitorch_pjrt::{Client, ClientOptions, Platform, Plugin};
use oxitorch_testkit::fake_plugin::FakePlugin;

const HERE: Site = Site(0);
const N: usize = 4;

fn engine(fake: &FakePlugin) -> Engine {
    engine_on(fake, Platform::Tpu, || false)
}

fn engine_on(fake: &FakePlugin, platform: Platform, deterministic: fn() -> bool) -> Engine {
    // SAFETY: the fake's table honours the headers and lives for ever.
    let plugin = unsafe { Plugin::from_api(platform, fake.table(), Path::new("fake")) }.unwrap();
    let client = Client::new(plugin, &ClientOptions::default()).unwrap();
    let options = Options {
        compile_threads: 1,
        cache: CacheOptions::default(),
        graphs: None,
        background_compile: false,
        deterministic,
        target: TargetOptions::NONE,
        interrupt: || Ok(()),
    };
    Engine::start(Target::Client(client), &options).unwrap()
}

fn tensor(slot: &Slot, dtype: DType) -> TensorRef<'_> {
    TensorRef {
        place: Place::Device(slot),
        dtype: Some(dtype),
        sizes: &[N as i64],
        strides: &[1],
        offset: 0,
        contiguous: true,
        wrapped: false,
        device: 0,
        conj: false,
        neg: false,
    }
}

fn slot(dtype: DType) -> Slot {
    Slot::new(N * dtype.size_bytes(), 0)
}

/// A tensor with these bytes in each place.
fn uploaded(stream: &Stream, dtype: DType, byte: u8) -> Slot {
    let slot = slot(dtype);
    let bytes = vec![byte; slot.nbytes];
    stream.write_host(&tensor(&slot, dtype), &bytes, HERE, Mode::Fused).unwrap();
    slot
}

/// The same values in another dtype: one op.
fn cast(stream: &Stream, from: (&Slot, DType), to: DType, mode: Mode) -> Slot {
    let result = slot(to);
    stream.copy(&tensor(from.0, from.1), &tensor(&result, to), HERE, mode).unwrap();
    result
}

fn read(stream: &Stream, slot: &Slot, dtype: DType) -> Result<Vec<u8>, ErrorKind> {
    let mut out = vec![0; slot.nbytes];
    match stream.read_host(&tensor(slot, dtype), &mut out, HERE) {
        Ok(()) => Ok(out),
        Err(oxitorch_engine::Refusal::Error(e)) => Err(e.kind),
        Err(other) => panic!("{other:?}"),
    }
}

/// Launches an op whose result nobody keeps.
fn launch_and_forget(stream: &Stream) {
    let x = uploaded(stream, DType::F32, 1);
    drop(cast(stream, (&x, DType::F32), DType::F64, Mode::Strict));
}

#[test]
fn waits_are_for_what_was_launched_and_not_for_what_is_still_wanted() {
    let fake = FakePlugin::new();
    let engine = engine(&fake);
    let stream = engine.stream(0).unwrap();
    fake.hold();
    launch_and_forget(stream);
    while fake.calls("PJRT_LoadedExecutable_Execute") == 0 {
        std::thread::yield_now();
    }
    assert!(!stream.is_idle(HERE).unwrap());
    let (number, mark) = stream.mark(HERE).unwrap();
    let released = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let synchronized = scope.spawn(|| stream.synchronize(HERE).map(|()| released.load(Ordering::SeqCst)));
        let waited = scope.spawn(|| stream.wait(number).map(|()| released.load(Ordering::SeqCst)));
        std::thread::sleep(Duration::from_millis(100));
        assert!(mark.time().is_none());
        released.store(true, Ordering::SeqCst);
        fake.release();
        assert!(synchronized.join().unwrap().unwrap() && waited.join().unwrap().unwrap());
    });
    assert!(mark.time().is_some() && stream.is_idle(HERE).unwrap());
    engine.close();
}

#[test]
fn launches_in_flight_are_bounded_whether_or_not_their_results_are_wanted() {
    let fake = FakePlugin::new();
    let engine = engine(&fake);
    let stream = engine.stream(0).unwrap();
    launch_and_forget(stream); // compiles
    stream.synchronize(HERE).unwrap();
    let before = fake.calls("PJRT_LoadedExecutable_Execute");
    fake.hold();
    (0..60).for_each(|_| launch_and_forget(stream));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(
        fake.calls("PJRT_LoadedExecutable_Execute") - before,
        33,
        "32, and one that waits for its turn"
    );
    fake.release();
    stream.synchronize(HERE).unwrap();
    assert_eq!(fake.calls("PJRT_LoadedExecutable_Execute") - before, 60);
    engine.close();
}

#[test]
fn what_fails_on_the_device_is_raised_once() {
    let fake = FakePlugin::new();
    let engine = engine(&fake);
    let stream = engine.stream(0).unwrap();
    for late in [false, true] {
        if late {
            fake.hold();
        }
        fake.fail_values(13, "the chip is on fire");
        launch_and_forget(stream);
        while !late && !stream.is_idle(HERE).unwrap() {}
        std::thread::sleep(Duration::from_millis(20)); // the launch is on its way
        fake.release();
        let e = stream.synchronize(HERE).unwrap_err();
        assert!(e.message.contains("copy") && e.message.contains("the chip is on fire"), "{late}: {e}");
        fake.heal_values();
        stream.synchronize(HERE).unwrap();
    }
    engine.close();
}

#[test]
fn inputs_are_given_away_when_the_launch_is_accepted() {
    let fake = FakePlugin::new();
    let engine = engine(&fake);
    let stream = engine.stream(0).unwrap();
    let x = uploaded(stream, DType::F32, 7);
    let y = cast(stream, (&x, DType::F32), DType::S32, Mode::Fused);
    let z = cast(stream, (&y, DType::S32), DType::F64, Mode::Fused);
    drop(x); // its memory is for `y`
    fake.fail_once("PJRT_LoadedExecutable_Execute", 8, "no room");
    stream.cut(Reason::Wait, HERE).unwrap();
    // Both ops run by themselves.
    assert_eq!(read(stream, &y, DType::S32).unwrap(), [7; 16]);
    assert!(read(stream, &z, DType::F64).is_ok());
    stream.synchronize(HERE).unwrap();
    assert_eq!(fake.calls("PJRT_LoadedExecutable_Execute"), 3);
    engine.close();
}

#[test]
fn memory_is_counted_with_its_padding() {
    let fake = FakePlugin::new().tile(4096);
    let engine = engine(&fake);
    let stream = engine.stream(0).unwrap();
    let x = uploaded(stream, DType::F32, 1);
    stream.synchronize(HERE).unwrap();
    let before = stream.memory().bytes().current;
    let y = cast(stream, (&x, DType::F32), DType::F64, Mode::Strict);
    stream.synchronize(HERE).unwrap();
    assert_eq!(stream.memory().bytes().current - before, 4096);
    drop(y);
    stream.synchronize(HERE).unwrap();
    assert_eq!(stream.memory().bytes().current, before);
    engine.close();
}

#[test]
fn what_fits_survives_what_does_not() {
    let fake = FakePlugin::new();
    let engine = engine(&fake);
    let stream = engine.stream(0).unwrap();
    let memory = stream.memory();
    let x = uploaded(stream, DType::F32, 1);
    stream.synchronize(HERE).unwrap();
    let room = |bytes: u64| {
        memory.set_fraction(1.0);
        memory.set_fraction((memory.bytes().current + bytes) as f64 / memory.total() as f64);
    };
    room(56);
    // 16, 32 and 32 bytes in one window.
    let a = cast(stream, (&x, DType::F32), DType::S32, Mode::Fused);
    let b = cast(stream, (&x, DType::F32), DType::F64, Mode::Fused);
    let c = cast(stream, (&x, DType::F32), DType::S64, Mode::Fused);
    stream.cut(Reason::Wait, HERE).unwrap();
    assert_eq!(read(stream, &c, DType::S64), Err(ErrorKind::OutOfMemory));
    assert!(read(stream, &a, DType::S32).is_ok() && read(stream, &b, DType::F64).is_ok());
    stream.synchronize(HERE).unwrap(); // the failure was seen
    // A copy from the host waits for what holds memory that nobody wants, before it gives up.
    drop(b);
    fake.hold();
    let big = cast(stream, (&x, DType::F32), DType::F64, Mode::Strict);
    drop(big);
    fake.release();
    let again = uploaded(stream, DType::F32, 2);
    assert!(read(stream, &again, DType::F32).is_ok());
    engine.close();
}

#[test]
fn deterministic_algorithms_are_asked_of_the_compiler_for_gpus() {
    static WANTED: AtomicBool = AtomicBool::new(false);
    let fake = FakePlugin::new();
    for platform in [Platform::Cuda, Platform::Tpu] {
        let before = fake.compiled_with("x").len();
        let engine = engine_on(&fake, platform, || WANTED.load(Ordering::SeqCst));
        let stream = engine.stream(0).unwrap();
        // The same op each time; what it was compiled for before is not run where the switch says otherwise.
        for wanted in [false, true, true, false] {
            WANTED.store(wanted, Ordering::SeqCst);
            launch_and_forget(stream);
            stream.synchronize(HERE).unwrap();
        }
        let compiled = &fake.compiled_with("xla_gpu_deterministic_ops")[before..];
        let expected: &[bool] = if platform == Platform::Cuda { &[false, true] } else { &[false] };
        assert_eq!(compiled, expected, "{platform}");
        engine.close();
    }
}
