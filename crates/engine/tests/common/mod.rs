//! What the tests of the engine share: an engine on the fake plugin, tensors, and calls as the front end makes them.
//!
//! The fake plugin computes nothing, so tests look at what the engine decides: how many programs there are and what is
//! in them, what is launched, what is given away, and what is said when something goes wrong.

#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod cpu_plugin;
pub(crate) mod meshes;
pub(crate) mod processes;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use oxitorch_aten::args::Number;
use oxitorch_aten::{Schema, TargetOptions};
use oxitorch_engine::{
    ArgRef, CacheOptions, Call, Engine, Error, ErrorKind, Meta, Metrics, Mode, Op, Options, Output, Outputs,
    Place, Reason, Refusal, Site, Slot, Stream, Switches, Target, TensorRef, set_resolver,
};
use oxitorch_hlo::DType;
use oxitorch_pjrt::{Client, ClientOptions, Platform, Plugin};
use oxitorch_testkit::fake_plugin::FakePlugin;
use parking_lot::Mutex;

/// An unknown Python line.
pub(crate) const HERE: Site = Site(0);
/// Elements of the tensors that have no other size.
pub(crate) const N: usize = 4;

pub(crate) const RELU: &str = "relu(Tensor self) -> Tensor";
pub(crate) const SUM: &str = "sum(Tensor self, *, ScalarType? dtype=None) -> Tensor";
pub(crate) const NEG: &str = "neg(Tensor self) -> Tensor";
pub(crate) const ADD: &str = "add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor";
pub(crate) const MUL: &str = "mul.Tensor(Tensor self, Tensor other) -> Tensor";
pub(crate) const MUL_: &str = "mul_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)";
pub(crate) const RELU_: &str = "relu_(Tensor(a!) self) -> Tensor(a!)";

/// A client of the fake plugin.
pub(crate) fn client(fake: &FakePlugin, platform: Platform) -> Result<Arc<Client>, oxitorch_pjrt::Error> {
    // SAFETY: the fake's table honours the headers and lives for ever.
    let plugin = unsafe { Plugin::from_api(platform, fake.table(), Path::new("fake")) }?;
    Client::new(plugin, &ClientOptions::default())
}

/// How engines of tests are started: one compiler thread, no cache folder.
pub(crate) fn options() -> Options {
    Options {
        compile_threads: 1,
        cache: CacheOptions::default(),
        graphs: None,
        background_compile: false,
        deterministic: || false,
        target: TargetOptions::NONE,
        interrupt: || Ok(()),
        numbered: None,
        at_least: 1,
    }
}

/// An engine on the fake plugin. When it goes, so must everything that the plugin made for it.
pub(crate) struct Rig {
    pub(crate) engine: Engine,
    /// The Python line that calls.
    pub(crate) line: Cell<u32>,
    pub(crate) fake: Fake,
}

/// The fake plugin, of which nothing must be left when the engine is gone.
pub(crate) struct Fake {
    plugin: FakePlugin,
    left: Cell<Option<&'static str>>,
}

impl Fake {
    /// The plugin refuses to destroy one object of this kind.
    pub(crate) fn leaves(&self, kind: &'static str) {
        self.left.set(Some(kind));
    }
}

impl Deref for Fake {
    type Target = FakePlugin;

    fn deref(&self) -> &FakePlugin {
        &self.plugin
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // Threads let go of what they hold a moment after the engine is closed. The next fake must not see that.
        let end = Instant::now() + Duration::from_secs(5);
        let expected: BTreeMap<&str, i64> = self.left.get().into_iter().map(|kind| (kind, 1)).collect();
        let is_over = || self.calls("PJRT_Client_Destroy") > 0 && self.live() == expected;
        while !is_over() && self.calls("PJRT_Client_Create") > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
        if std::thread::panicking() {
            return;
        }
        assert_eq!(self.live(), expected, "objects that the engine left");
    }
}

impl Rig {
    /// One TPU, since the engine knows least of those.
    pub(crate) fn new() -> Rig {
        Rig::on(FakePlugin::new(), Platform::Tpu)
    }

    pub(crate) fn on(fake: FakePlugin, platform: Platform) -> Rig {
        Rig::with(fake, platform, &options())
    }

    pub(crate) fn with(fake: FakePlugin, platform: Platform, options: &Options) -> Rig {
        let client = client(&fake, platform).unwrap();
        Rig::of(fake, Target::Client(client), options)
    }

    /// An engine for any target; the fake is not used where that is not there.
    pub(crate) fn of(fake: FakePlugin, target: Target, options: &Options) -> Rig {
        set_resolver(|site| Some(format!("script.py:{}", site.0)));
        let engine = Engine::start(target, options).unwrap();
        Rig { engine, line: Cell::new(0), fake: Fake { plugin: fake, left: Cell::default() } }
    }

    pub(crate) fn stream(&self) -> &Stream {
        self.engine.stream(0).unwrap()
    }

    pub(crate) fn site(&self) -> Site {
        Site(self.line.get())
    }

    /// The ops that follow are of this Python line.
    pub(crate) fn at(&self, line: u32) -> &Rig {
        self.line.set(line);
        self
    }

    pub(crate) fn mode(&self, mode: Mode) {
        self.engine.set_switches(|s| s.mode = mode);
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        self.engine.metrics()
    }

    /// Programs that were put together, and programs that were launched.
    pub(crate) fn programs_and_launches(&self) -> (u64, u64) {
        (self.metrics().programs.load(Relaxed), self.metrics().launches.load(Relaxed))
    }

    /// What happened in `f`, once the device has run it: programs that went to the compiler, and launches.
    pub(crate) fn counts(&self, f: impl FnOnce()) -> (usize, usize) {
        let calls = || {
            self.sync().unwrap();
            (self.fake.programs().len(), self.fake.calls("PJRT_LoadedExecutable_Execute"))
        };
        let before = calls();
        f();
        let after = calls();
        (after.0 - before.0, after.1 - before.1)
    }

    /// The programs that went to the compiler in `f`.
    pub(crate) fn compiled(&self, f: impl FnOnce()) -> Vec<String> {
        self.sync().unwrap();
        let before = self.fake.programs().len();
        f();
        self.sync().unwrap();
        self.fake.programs().split_off(before)
    }

    /// Windows that ended in `f`, by reason.
    pub(crate) fn flushes(&self, f: impl FnOnce()) -> BTreeMap<&'static str, u64> {
        let before = self.metrics().flushes();
        f();
        let mut after = self.metrics().flushes();
        after.iter_mut().for_each(|(reason, n)| *n -= before.get(reason).copied().unwrap_or(0));
        after.retain(|_, n| *n > 0);
        after
    }

    /// Bytes of the device that are in use.
    pub(crate) fn bytes(&self) -> u64 {
        self.stream().memory().bytes().current
    }

    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.stream().synchronize(self.site())
    }

    pub(crate) fn cut(&self, reason: Reason) {
        self.stream().cut(reason, self.site()).unwrap();
    }

    /// A tensor with these bytes in each place.
    pub(crate) fn uploaded(&self, dtype: DType, sizes: &[i64], byte: u8) -> Tensor {
        let tensor = Tensor::new(dtype, sizes);
        self.write(&tensor, byte).unwrap();
        tensor
    }

    /// Four floats.
    pub(crate) fn floats(&self) -> Tensor {
        self.uploaded(DType::F32, &[N as i64], 1)
    }

    pub(crate) fn write(&self, tensor: &Tensor, byte: u8) -> Result<(), Refusal> {
        let bytes = vec![byte; tensor.bytes()];
        let mode = self.engine.switches().mode;
        self.stream().write_host(&tensor.by_ref(), &bytes, self.site(), mode)
    }

    pub(crate) fn read(&self, tensor: &Tensor) -> Result<Vec<u8>, Error> {
        let mut out = vec![0; tensor.bytes()];
        match self.stream().read_host(&tensor.by_ref(), &mut out, self.site()) {
            Ok(()) => Ok(out),
            Err(refusal) => Err(error(refusal)),
        }
    }

    /// The same values in another dtype: one op.
    pub(crate) fn cast(&self, from: &Tensor, to: DType) -> Tensor {
        let result = Tensor::new(to, &from.sizes);
        self.copy(from, &result);
        result
    }

    /// A copy into a tensor of the same shape.
    pub(crate) fn copy(&self, from: &Tensor, to: &Tensor) {
        self.stream().copy(&from.by_ref(), &to.by_ref(), self.site(), &self.engine.switches()).unwrap();
    }

    /// One call of an overload the long way.
    pub(crate) fn dispatch(&self, schema: &str, args: &[ArgRef<'_>]) -> Result<Vec<Returned>, Refusal> {
        self.dispatch_with(schema, args, self.engine.switches())
    }

    pub(crate) fn dispatch_with(
        &self,
        schema: &str,
        args: &[ArgRef<'_>],
        switches: Switches,
    ) -> Result<Vec<Returned>, Refusal> {
        let rng = |_: Option<usize>, blocks: u64| (7, blocks);
        let call =
            Call { device: 0, op: op(schema), args, rng: &rng, site: self.site(), switches, size: None };
        let mut out = Outputs::new();
        self.engine.dispatch(&call, &mut out)?;
        Ok(out.into_iter().map(Returned::from).collect())
    }

    /// A call that gives one new tensor.
    pub(crate) fn one(&self, schema: &str, args: &[ArgRef<'_>]) -> Tensor {
        match self.dispatch(schema, args).unwrap().pop() {
            Some(Returned::New(tensor)) => tensor,
            other => panic!("{schema}: {other:?}"),
        }
    }

    pub(crate) fn relu(&self, x: &Tensor) -> Tensor {
        self.one(RELU, &[x.arg()])
    }

    pub(crate) fn neg(&self, x: &Tensor) -> Tensor {
        self.one(NEG, &[x.arg()])
    }

    pub(crate) fn add(&self, x: &Tensor, y: &Tensor) -> Tensor {
        self.one(ADD, &[x.arg(), y.arg(), int(1)])
    }

    /// So many ops, each on the result of the one before, each of a line of its own, from `first` on.
    pub(crate) fn chain(&self, x: &Tensor, ops: u32, first: u32) -> Tensor {
        let step = |x: Tensor, i| {
            self.at(first + i);
            if i % 2 == 0 { self.neg(&x) } else { self.relu(&x) }
        };
        (0..ops).fold(x.clone(), step)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.fake.release();
        self.engine.close();
    }
}

/// A tensor as the front end has it: a storage, and how it looks at that.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) slot: Arc<Slot>,
    pub(crate) dtype: DType,
    pub(crate) sizes: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) offset: i64,
}

impl Tensor {
    /// Row-major, over a storage of its own that nobody has written.
    pub(crate) fn new(dtype: DType, sizes: &[i64]) -> Tensor {
        let bytes = sizes.iter().product::<i64>() as usize * dtype.size_bytes();
        Tensor::over(Slot::new(bytes, 0), dtype, sizes, &row_major(sizes))
    }

    fn over(slot: Slot, dtype: DType, sizes: &[i64], strides: &[i64]) -> Tensor {
        Tensor { slot: Arc::new(slot), dtype, sizes: sizes.into(), strides: strides.into(), offset: 0 }
    }

    /// Another look at the same storage.
    pub(crate) fn view(&self, sizes: &[i64], strides: &[i64], offset: i64) -> Tensor {
        Tensor { sizes: sizes.into(), strides: strides.into(), offset, ..self.clone() }
    }

    /// So many elements of a 1-d tensor from this one on.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Tensor {
        self.view(&[length], &[1], start)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.sizes.iter().product::<i64>() as usize * self.dtype.size_bytes()
    }

    pub(crate) fn by_ref(&self) -> TensorRef<'_> {
        TensorRef {
            contiguous: self.strides == row_major(&self.sizes),
            ..described(Place::Device(&self.slot), self.dtype, &self.sizes, &self.strides, self.offset)
        }
    }

    pub(crate) fn arg(&self) -> ArgRef<'_> {
        ArgRef::Tensor(self.by_ref())
    }
}

fn described<'a>(
    place: Place<'a>,
    dtype: DType,
    sizes: &'a [i64],
    strides: &'a [i64],
    offset: i64,
) -> TensorRef<'a> {
    TensorRef {
        place,
        dtype: Some(dtype),
        sizes,
        strides,
        offset,
        contiguous: true,
        wrapped: false,
        device: 0,
        conj: false,
        neg: false,
    }
}

/// A Python number that PyTorch made a 0-d tensor of the CPU.
pub(crate) fn wrapped(bytes: &[u8; 8]) -> TensorRef<'_> {
    TensorRef { wrapped: true, ..described(Place::Host(bytes), DType::F64, &[], &[], 0) }
}

/// A row-major tensor of the CPU.
pub(crate) fn on_host<'a>(
    bytes: &'a [u8],
    dtype: DType,
    sizes: &'a [i64],
    strides: &'a [i64],
) -> TensorRef<'a> {
    described(Place::Host(bytes), dtype, sizes, strides, 0)
}

pub(crate) fn int<'a>(n: i64) -> ArgRef<'a> {
    ArgRef::Number(Number::Int(n))
}

pub(crate) fn float<'a>(x: f64) -> ArgRef<'a> {
    ArgRef::Number(Number::Float(x))
}

pub(crate) fn row_major(sizes: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; sizes.len()];
    for d in (1..sizes.len()).rev() {
        strides[d - 1] = strides[d] * sizes[d].max(1);
    }
    strides
}

/// A result of a call.
#[derive(Debug)]
pub(crate) enum Returned {
    New(Tensor),
    Resized(usize, Tensor),
    Other(Output),
}

impl From<Output> for Returned {
    fn from(output: Output) -> Returned {
        let tensor =
            |slot, meta: &Meta| Tensor::over(slot, meta.ty().dtype, &meta.ty().shape, meta.strides());
        match output {
            Output::New(slot, meta) => Returned::New(tensor(slot, &meta)),
            Output::Resized { arg, slot, meta } => Returned::Resized(arg, tensor(slot, &meta)),
            other => Returned::Other(other),
        }
    }
}

/// The op of a schema: one for each, since an op is known by where it is.
pub(crate) fn op(schema: &str) -> &'static Op {
    static OPS: LazyLock<Mutex<BTreeMap<String, &'static Op>>> = LazyLock::new(Mutex::default);
    let mut ops = OPS.lock();
    ops.entry(schema.to_owned()).or_insert_with(|| {
        let op = Op::bind(&Schema::parse(schema).unwrap());
        Box::leak(Box::new(op.unwrap_or_else(|| panic!("no row serves `{schema}`"))))
    })
}

/// One call from any thread, that gives one new tensor.
pub(crate) fn dispatch(engine: &Engine, schema: &str, args: &[ArgRef<'_>]) -> Tensor {
    let rng = |_: Option<usize>, blocks: u64| (7, blocks);
    let switches = engine.switches();
    let call = Call { device: 0, op: op(schema), args, rng: &rng, site: Site(1), switches, size: None };
    let mut out = Outputs::new();
    engine.dispatch(&call, &mut out).unwrap();
    match out.pop().map(Returned::from) {
        Some(Returned::New(tensor)) => tensor,
        other => panic!("{schema}: {other:?}"),
    }
}

/// The error of a call that was expected to be one.
pub(crate) fn error(refusal: Refusal) -> Error {
    match refusal {
        Refusal::Error(e) => e,
        Refusal::Fallback(why) => Error::new(ErrorKind::NotImplemented, why),
    }
}

/// Waits for what another thread is about to do.
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < end, "it never came: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// How many inputs a program takes, and which of them it may overwrite.
pub(crate) fn donors(program: &str) -> (usize, Vec<usize>) {
    let main = program.split_once("@main(").unwrap().1.split_once(" -> ").unwrap().0;
    let inputs: Vec<&str> = main.split("%arg").skip(1).collect();
    let given = |input: &&str| input.contains("tf.aliasing_output") || input.contains("jax.buffer_donor");
    let given = inputs.iter().enumerate().filter(|(_, input)| given(input)).map(|(i, _)| i).collect();
    (inputs.len(), given)
}

/// How many operations of this name a program has.
pub(crate) fn count_of(program: &str, operation: &str) -> usize {
    program.matches(&format!("stablehlo.{operation} ")).count()
}

/// How many results a program has.
pub(crate) fn results(program: &str) -> usize {
    let results =
        program.split_once("@main(").unwrap().1.lines().next().unwrap().split_once(" -> ").unwrap().1;
    results.matches("tensor<").count()
}
