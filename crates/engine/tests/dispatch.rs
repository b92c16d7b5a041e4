//! Calls as the front end makes them: their forms, their results, and what is refused.

use common::{
    ADD, NEG, RELU_, Returned, Rig, Tensor, count_of, donors, error, int, on_host, options, row_major,
};
use oxitorch_aten::args::Number;
use oxitorch_engine::{
    ArgRef, Call, ErrorKind, Mode, Options, Output, Outputs, Place, Refusal, Site, TensorRef,
};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

const ADD_OUT: &str = "add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)";
const ADD_: &str = "add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)";
const CAT: &str = "cat(Tensor[] tensors, int dim=0) -> Tensor";
const DROPOUT: &str = "native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)";
const EACH: &str = "_foreach_add.List(Tensor[] self, Tensor[] other, *, Scalar alpha=1) -> Tensor[]";
const EACH_: &str = "_foreach_neg_(Tensor(a!)[] self) -> ()";
const NONZERO: &str = "nonzero(Tensor self) -> Tensor";
const UNIFORM_: &str =
    "uniform_(Tensor(a!) self, float from=0, float to=1, *, Generator? generator=None) -> Tensor(a!)";
const INDEX: &str = "index.Tensor(Tensor self, Tensor?[] indices) -> Tensor";
const CLONE: &str = "clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor";

fn message(rig: &Rig, schema: &str, args: &[ArgRef<'_>]) -> String {
    error(rig.dispatch(schema, args).map(drop).unwrap_err()).message.to_string()
}

#[test]
fn a_result_has_the_type_and_strides_that_torch_gives() {
    let rig = Rig::new();
    let x = rig.uploaded(DType::F32, &[2, 3], 1);
    let t = x.view(&[3, 2], &[1, 3], 0);
    let like = rig.neg(&t);
    assert_eq!(
        (like.dtype, like.sizes.as_slice(), like.strides.as_slice()),
        (DType::F32, &[3, 2][..], &[1, 3][..])
    );
    let contiguous = rig.one(CLONE, &[t.arg(), int(0)]);
    assert_eq!(contiguous.strides, [2, 1]);
    let ints = rig.uploaded(DType::S32, &[3], 1);
    let wide = rig.add(&ints, &x);
    assert_eq!((wide.dtype, wide.sizes.as_slice()), (DType::F32, &[2, 3][..]));
    assert_eq!(wide.slot.nbytes, 24);
    rig.sync().unwrap();
}

#[test]
fn an_in_place_op_gives_its_argument_back() {
    let rig = Rig::new();
    let (x, y) = (rig.floats(), rig.floats());
    let out = rig.dispatch(ADD_, &[x.arg(), y.arg(), int(1)]).unwrap();
    assert!(matches!(out[..], [Returned::Other(Output::Arg(0))]), "{out:?}");
    // On a view it writes that part of the storage.
    let programs = rig.compiled(|| drop(rig.dispatch(RELU_, &[x.narrow(1, 2).arg()]).unwrap()));
    assert_eq!(count_of(&programs[0], "maximum"), 1, "{}", programs[0]);
    assert!(
        programs[0].contains("-> tensor<4xf32>") || programs[0].contains("-> (tensor<4xf32>"),
        "{}",
        programs[0]
    );
    assert_eq!(rig.read(&x).unwrap().len(), 16);
}

#[test]
fn an_out_argument_is_written_or_resized() {
    let rig = Rig::new();
    let (x, y) = (rig.floats(), rig.floats());
    let out = rig.uploaded(DType::F32, &[4], 0);
    let results = rig.dispatch(ADD_OUT, &[x.arg(), y.arg(), int(1), out.arg()]).unwrap();
    assert!(matches!(results[..], [Returned::Other(Output::Arg(3))]), "{results:?}");
    assert_eq!(rig.read(&out).unwrap(), [1; 16], "the fake's sum: its first argument");
    let small = rig.uploaded(DType::F64, &[2], 0);
    let results = rig.dispatch(ADD_OUT, &[x.arg(), y.arg(), int(1), small.arg()]).unwrap();
    let [Returned::Resized(3, new)] = &results[..] else { panic!("{results:?}") };
    assert_eq!((new.dtype, new.sizes.as_slice(), new.slot.nbytes), (DType::F64, &[4][..], 32));
    rig.sync().unwrap();
}

#[test]
fn lists_are_walked_and_given_back() {
    let rig = Rig::new();
    let pairs: Vec<(Tensor, Tensor)> =
        (1..4).map(|n| (rig.uploaded(DType::F32, &[n], 1), rig.uploaded(DType::F32, &[n], 1))).collect();
    let a = ArgRef::Tensors(pairs.iter().map(|(a, _)| a.by_ref()).collect());
    let b = ArgRef::Tensors(pairs.iter().map(|(_, b)| b.by_ref()).collect());
    let out = rig.dispatch(EACH, &[a.clone(), b.clone(), int(1)]).unwrap();
    let [Returned::Other(Output::List(3)), rest @ ..] = &out[..] else { panic!("{out:?}") };
    let sizes: Vec<_> = rest.iter().map(|r| if let Returned::New(t) = r { t.sizes[0] } else { 0 }).collect();
    assert_eq!(sizes, [1, 2, 3]);
    assert_eq!(rig.counts(|| ()), (0, 0));
    assert_eq!(rig.fake.calls("PJRT_LoadedExecutable_Execute"), 1, "one window");
    // In place nothing comes back.
    assert!(rig.dispatch(EACH_, std::slice::from_ref(&a)).unwrap().is_empty());
    let short = ArgRef::Tensors(pairs[..2].iter().map(|(a, _)| a.by_ref()).collect());
    let refused = message(&rig, EACH, &[a.clone(), short, int(1)]);
    assert!(refused.contains("Tensor lists must have the same number of tensors, got 3 and 2"), "{refused}");
    rig.sync().unwrap();
    // Without windows there is one program for each shape.
    rig.mode(Mode::Strict);
    let same = ArgRef::Tensors(vec![pairs[1].0.by_ref(), pairs[1].1.by_ref(), pairs[1].0.by_ref()]);
    let mut out = vec![];
    let counts = rig.counts(|| out = rig.dispatch(EACH, &[same.clone(), same, int(1)]).unwrap());
    assert_eq!(counts.1, 3);
    assert!(counts.0 <= 2, "{counts:?}");
    let joined = rig.one(CAT, &[b, int(0)]);
    assert_eq!(joined.sizes, [6]);
}

#[test]
fn a_size_that_depends_on_values_is_read_first() {
    let rig = Rig::new();
    // The fake's count is what the first argument of eight bytes holds.
    let x = rig.uploaded(DType::F32, &[2], 0);
    let y = rig.neg(&x);
    let out = rig.one(NONZERO, &[x.arg()]);
    assert_eq!((out.sizes.as_slice(), out.dtype), (&[0, 1][..], DType::S64));
    assert_eq!(rig.metrics().flushes()["read"], 1);
    drop(y);
}

#[test]
fn random_numbers_are_drawn_and_never_compiled_in() {
    let rig = Rig::new();
    let x = rig.floats();
    let drawn = std::cell::RefCell::new(vec![]);
    let draw = |generator: ArgRef<'_>| {
        let rng = |generator: Option<usize>, blocks: u64| {
            drawn.borrow_mut().push((generator, blocks));
            (drawn.borrow().len() as u64, blocks)
        };
        let args =
            [x.arg(), ArgRef::Number(Number::Float(0.0)), ArgRef::Number(Number::Float(1.0)), generator];
        let switches = rig.engine.switches();
        let call = Call {
            device: 0,
            op: common::op(UNIFORM_),
            args: &args,
            rng: &rng,
            site: Site(1),
            switches,
            size: None,
        };
        rig.engine.dispatch(&call, &mut Outputs::new()).unwrap();
        rig.read(&x).unwrap();
    };
    draw(ArgRef::None);
    assert_eq!(rig.counts(|| draw(ArgRef::None)).0, 0, "another seed is no other program");
    draw(ArgRef::Generator(5));
    let drawn = drawn.into_inner();
    assert_eq!(drawn.iter().map(|d| d.0).collect::<Vec<_>>(), [None, None, Some(5)]);
    assert!(drawn.iter().all(|d| d.1 == drawn[0].1 && d.1 > 0), "{drawn:?}");
}

#[test]
fn what_a_fill_overwrites_is_no_operand() {
    let rig = Rig::new();
    let x = rig.floats();
    let fill = "fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)";
    let programs = rig.compiled(|| drop(rig.dispatch(fill, &[x.arg(), int(3)]).unwrap()));
    let (inputs, donors) = donors(&programs[0]);
    assert_eq!((inputs, donors.len()), (1, 0), "the number alone: {}", programs[0]);
    // So a value that failed can be overwritten.
    rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "out of luck");
    let y = rig.neg(&x);
    assert!(rig.read(&y).is_err());
    rig.dispatch(fill, &[y.arg(), int(3)]).unwrap();
    assert!(rig.read(&y).is_ok());
}

#[test]
fn a_storage_that_nobody_wrote_holds_zeros() {
    let rig = Rig::new();
    let x = Tensor::new(DType::F32, &[4]);
    assert_eq!(rig.counts(|| assert_eq!(rig.read(&x).unwrap(), [0; 16])), (0, 0));
    let programs = rig.compiled(|| drop(rig.read(&rig.neg(&x)).unwrap()));
    assert_eq!(donors(&programs[0]).0, 0, "a constant: {}", programs[0]);
    let larger = rig.stream().resized(&x.slot, 32, rig.site(), Mode::Fused).unwrap();
    assert_eq!(larger.nbytes, 32);
}

#[test]
fn reads_of_views_compile_nothing_where_they_are_small() {
    for platform in [Platform::Tpu, Platform::Cpu] {
        let rig = Rig::on(FakePlugin::new(), platform);
        let x = rig.uploaded(DType::F32, &[4, 4], 3);
        let t = x.view(&[4, 2], &[1, 4], 1);
        assert_eq!(rig.counts(|| assert_eq!(rig.read(&t).unwrap(), [3; 32])), (0, 0), "{platform}");
        let large = rig.uploaded(DType::F32, &[1 << 16], 3);
        let programs = rig.compiled(|| assert_eq!(rig.read(&large.narrow(5, 2)).unwrap().len(), 8));
        // Elsewhere than in the host's memory a small part of much is cut out there.
        assert_eq!(programs.len(), usize::from(platform == Platform::Tpu), "{platform}");
    }
}

#[test]
fn an_index_may_be_on_the_host() {
    let rig = Rig::new();
    // The fake says what the first four bytes say: -1, no index is out of bounds.
    let x = rig.uploaded(DType::F32, &[1], 0xff);
    let bytes: Vec<u8> = [0i64, 0].iter().flat_map(|n| n.to_le_bytes()).collect();
    let (sizes, strides) = ([2], row_major(&[2]));
    let index = on_host(&bytes, DType::S64, &sizes, &strides);
    let y = rig.one(INDEX, &[x.arg(), ArgRef::Tensors(vec![index.clone()])]);
    assert_eq!(y.sizes, [2]);
    rig.read(&y).unwrap();
    // Any other operand has to be on the device, unless it is a number.
    let refused = message(&rig, ADD, &[x.arg(), ArgRef::Tensor(index), int(1)]);
    assert!(refused.contains("tpu:0 and cpu!"), "{refused}");
}

#[test]
fn an_error_names_op_arguments_and_line() {
    let rig = Rig::new();
    let (x, y) = (rig.floats(), rig.uploaded(DType::S64, &[2, 3], 1));
    let e = error(rig.at(17).dispatch(ADD, &[x.arg(), y.arg(), int(2)]).map(drop).unwrap_err());
    let expected = "\n  in aten::add.Tensor(float32[4], int64[2, 3], 2)\n  called at script.py:17";
    assert!(e.message.ends_with(expected), "{e}");
    assert_eq!(e.kind, ErrorKind::Runtime);
    assert_eq!(rig.counts(|| ()), (0, 0), "nothing was recorded");
}

#[test]
fn what_has_no_lowering_is_for_the_cpu() {
    let rig = Rig::new();
    let x = rig.floats();
    let odd = TensorRef { dtype: None, ..x.by_ref() };
    let refusal = rig.dispatch(NEG, &[ArgRef::Tensor(odd)]).map(drop).unwrap_err();
    assert!(matches!(refusal, Refusal::Fallback(_)), "{refusal:?}");
    let refusal = rig.dispatch(NEG, &[ArgRef::Other]).map(drop).unwrap_err();
    assert!(matches!(refusal, Refusal::Fallback(_)), "{refusal:?}");
    rig.engine.fell_back("aten::neg", Site(1));
    assert_eq!(rig.metrics().fallbacks()["aten::neg"], 1);
}

#[test]
fn memory_that_is_written_twice_is_refused() {
    let rig = Rig::new();
    let x = rig.uploaded(DType::F32, &[8], 1);
    let same_place = x.view(&[4], &[0], 0);
    let refused = message(&rig, RELU_, &[same_place.arg()]);
    assert!(refused.contains("more than one element of the written-to tensor"), "{refused}");
    let refused = message(&rig, ADD_, &[x.narrow(0, 4).arg(), x.narrow(2, 4).arg(), int(1)]);
    assert!(refused.contains("some elements of the input tensor and the written-to tensor"), "{refused}");
    assert!(rig.dispatch(ADD_, &[x.narrow(0, 4).arg(), x.narrow(4, 4).arg(), int(1)]).is_ok(), "apart");
    assert!(rig.dispatch(ADD_, &[x.arg(), x.arg(), int(1)]).is_ok(), "the same");
    let beyond = message(&rig, NEG, &[x.narrow(6, 4).arg()]);
    assert!(beyond.contains("out of bounds for storage of size 32"), "{beyond}");
}

#[test]
fn a_device_has_its_own_tensors() {
    let rig = Rig::on(FakePlugin::new().devices(2), Platform::Tpu);
    assert_eq!(rig.engine.device_count(), 2);
    let x = rig.floats();
    let other = oxitorch_engine::Slot::new(16, 1);
    let y = TensorRef { place: Place::Device(&other), device: 1, ..x.by_ref() };
    let refused = message(&rig, ADD, &[x.arg(), ArgRef::Tensor(y), int(1)]);
    assert!(refused.contains("tpu:0 and tpu:1!"), "{refused}");
    let Err(refusal) = rig.engine.stream(2) else { panic!() };
    assert!(error(refusal).message.contains("device index 2 does not exist: there are 2"));
}

#[test]
fn devices_that_the_client_does_not_have_are_its_own_once_more() {
    let options = Options { at_least: 3, ..options() };
    let mut rig = Rig::with(FakePlugin::new(), Platform::Cpu, &options);
    // Programs of several devices want several.
    let mesh = oxitorch_engine::Mesh::new(&[("x", 2)]).unwrap();
    let e = rig.engine.add_mesh(mesh, &[0, 1]).unwrap_err();
    assert!(e.message.contains("tpu:1 of a mesh is not one of 1 devices"), "{e}");
    let client = rig.engine.target().client().unwrap();
    assert_eq!((client.devices().len(), rig.engine.device_count(), rig.engine.own_devices()), (1, 3, 0..3));
    assert_eq!(rig.engine.own_devices().map(|d| rig.engine.place_of(d)).collect::<Vec<_>>(), [0, 0, 0]);
    // Each has its own tensors and its own account of memory.
    let x = rig.floats();
    let other = oxitorch_engine::Slot::new(16, 2);
    let y = TensorRef { place: Place::Device(&other), device: 2, ..x.by_ref() };
    assert!(message(&rig, ADD, &[x.arg(), ArgRef::Tensor(y), int(1)]).contains("tpu:0 and tpu:2!"));
    rig.sync().unwrap();
    let allocated = |d: usize| rig.engine.stream(d).unwrap().memory().bytes().current;
    assert!(allocated(0) > 0);
    assert_eq!((allocated(1), allocated(2)), (0, 0));
    let Err(refusal) = rig.engine.stream(3) else { panic!() };
    assert!(error(refusal).message.contains("device index 3 does not exist: there are 3"));
}

#[test]
fn what_could_never_fit_is_refused_at_once() {
    let rig = Rig::new();
    let x = rig.uploaded(DType::F32, &[64], 1);
    rig.sync().unwrap();
    let memory = rig.stream().memory();
    memory.set_fraction(512.0 / memory.total() as f64);
    let refusal = error(
        rig.at(4)
            .dispatch(ADD, &[x.view(&[64, 1], &[1, 1], 0).arg(), x.arg(), int(1)])
            .map(drop)
            .unwrap_err(),
    );
    assert_eq!(refusal.kind, ErrorKind::OutOfMemory);
    assert!(
        refusal.message.contains("script.py:4") && refusal.message.contains("memory_fraction"),
        "{refusal}"
    );
    assert_eq!(memory.ooms(), 1);
    // What does not fit now waits until it is launched.
    let y = rig.neg(&x);
    rig.read(&y).unwrap();
    memory.set_fraction(1.0);
}

#[test]
fn several_results_come_in_order() {
    let rig = Rig::new();
    let x = rig.floats();
    let args = [x.arg(), ArgRef::Number(Number::Float(0.5)), ArgRef::Number(Number::Bool(true))];
    let out = rig.dispatch(DROPOUT, &args).unwrap();
    let dtypes: Vec<_> =
        out.iter().map(|r| if let Returned::New(t) = r { t.dtype } else { panic!("{r:?}") }).collect();
    assert_eq!(dtypes, [DType::F32, DType::Pred]);
    rig.sync().unwrap();
    assert_eq!(common::results(&rig.fake.programs()[0]), 2);
}
