//! Programs of collectives are compiled for eight TPUs and eight GPUs that are not there: all kinds, of groups of all
//! devices, of halves, and of devices that lie apart; as a mesh of one process makes them, and as processes make them, of
//! which each has one device. libtpu and the CUDA plugin are there for x86-64 alone.
#![cfg(target_arch = "x86_64")]

use common::cpu_plugin::cpu_plugin_path;
use common::meshes::{OnMesh, collective};
use common::{Rig, Tensor};
use oxitorch_engine::{Collective, Reduction};
use oxitorch_hlo::DType;
use oxitorch_pjrt::{
    CompileOptions, CudaTools, DiscoverOptions, LoadOptions, NamedValue, OptionValue, Platform, Plugin,
    Program, Topology, choose, discover,
};
use oxitorch_preflight::compile::cuda;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

/// A group of devices, or several that together are all.
type Groups = &'static [&'static [i32]];

const FULL: Groups = &[&[0, 1, 2, 3, 4, 5, 6, 7]];
const HALVES: Groups = &[&[0, 1, 2, 3], &[4, 5, 6, 7]];
const STRIDED: Groups = &[&[0, 2, 4, 6], &[1, 3, 5, 7]];

fn kinds(dtype: DType) -> Vec<Collective> {
    let reductions = [Reduction::Sum, Reduction::Product, Reduction::Min, Reduction::Max];
    let bits = match dtype {
        DType::S32 => vec![Collective::AllReduce(Reduction::Xor), Collective::ReduceScatter(Reduction::And)],
        _ => vec![],
    };
    let all = reductions.map(Collective::AllReduce).into_iter();
    let all = all.chain(reductions.map(Collective::ReduceScatter)).chain(bits);
    all.chain([
        Collective::AllGather,
        Collective::AllToAll,
        Collective::Permute(vec![(0, 1), (1, 0)]),
        Collective::Broadcast(1),
    ])
    .collect()
}

/// Compiles ahead of time.
struct Compiler {
    topology: Topology,
    overrides: Vec<(String, OptionValue)>,
}

impl Compiler {
    fn new(platform: Platform) -> Compiler {
        let site = cpu_plugin_path().ancestors().nth(3).unwrap().to_owned();
        let found = discover(&DiscoverOptions { python_paths: vec![site.clone()], override_paths: vec![] });
        let path = &choose(&found, Some(platform), |_| true).unwrap().path;
        let plugin = Plugin::load(platform, path, &LoadOptions::for_platform(platform, true)).unwrap();
        if platform == Platform::Tpu {
            return Compiler { topology: Topology::new(plugin, "v5e:2x4", &[]).unwrap(), overrides: vec![] };
        }
        let options: Vec<(String, NamedValue)> = cuda::topology_options("h200:1x1x8").unwrap();
        let topology = Topology::new(plugin, "h200", &options).unwrap();
        let tools = CudaTools::find(&[site])
            .expect("ptxas and libdevice: `pip install nvidia-cuda-nvcc nvidia-nvvm`");
        let folder = tools.folder(&std::env::temp_dir()).unwrap().display().to_string();
        let mut overrides = cuda::overrides();
        // As all programs of a client of several processes have it: the plugin knows it.
        overrides.push(("xla_gpu_shard_autotuning".to_owned(), OptionValue::Bool(false)));
        overrides.push((CudaTools::OPTION.to_owned(), OptionValue::String(folder)));
        Compiler { topology, overrides }
    }

    /// Compiles a program of these devices.
    fn compile(&self, text: &str, ids: &[i32]) -> Result<(), String> {
        let options = CompileOptions {
            replicas: ids.len(),
            device_ids: ids.to_vec(),
            overrides: self.overrides.clone(),
            ..Default::default()
        };
        let compiled = self.topology.compile(&Program::mlir(text.as_bytes()), &options);
        let compiled = compiled.map_err(|e| format!("{ids:?}: {e}\n{text}"))?;
        assert_eq!(compiled.replicas_and_partitions().unwrap(), (ids.len(), 1));
        Ok(())
    }
}

fn filled(dtype: DType, rows: i64) -> (Vec<i64>, Vec<u8>) {
    (vec![rows, 4], vec![0; rows as usize * 4 * dtype.size_bytes()])
}

/// What processes of one device each make of their group: for each kind a program of its devices alone.
fn by_processes(platform: Platform, group: &[i32], dtype: DType) -> Vec<String> {
    let rig = Rig::on(FakePlugin::new().devices(1).elsewhere(7), platform);
    // The own device has number 0: the group's first is it.
    assert_eq!(group[0], 0);
    let (sizes, bytes) = filled(dtype, 8);
    let x = Tensor::new(dtype, &sizes);
    rig.stream().write_host(&x.by_ref(), &bytes, rig.site(), rig.engine.switches().mode).unwrap();
    rig.compiled(|| {
        for what in kinds(dtype) {
            collective(rig.stream(), &rig, &what, &[group.to_vec()], &x).unwrap();
        }
        rig.stream().synchronize(rig.site()).unwrap();
    })
}

/// What one process of all devices makes of groups: programs of all.
fn by_mesh(platform: Platform, groups: Groups, dtype: DType) -> Vec<String> {
    let rig = Rig::on(FakePlugin::new().devices(8), platform);
    let on = OnMesh::new(rig, &[("x", 8)], &[0, 1, 2, 3, 4, 5, 6, 7]);
    let (sizes, bytes) = filled(dtype, 64);
    let x = on.put(dtype, &sizes, &[&["x"]], &bytes);
    let groups: Vec<Vec<i32>> = groups.iter().map(|g| g.to_vec()).collect();
    on.rig.compiled(|| {
        for what in kinds(dtype) {
            on.collective(&what, &groups, &x).unwrap();
        }
        on.stream().synchronize(on.rig.site()).unwrap();
    })
}

fn compiles(platform: Platform, dtype: DType) {
    let compiler = Compiler::new(platform);
    let all: Vec<i32> = (0..8).collect();
    for groups in [FULL, HALVES, STRIDED] {
        let group = groups[0];
        let own = by_processes(platform, group, dtype);
        assert_eq!(own.len(), kinds(dtype).len());
        for text in &own {
            compiler.compile(text, &all[..group.len()]).unwrap();
            let named = compiler.compile(text, group);
            if platform == Platform::Tpu && groups == STRIDED {
                // It would abort libtpu. The process group asks the host there.
                assert!(named.unwrap_err().contains("for the first 4 alone"));
            } else {
                named.unwrap();
            }
        }
        let together = by_mesh(platform, groups, dtype);
        assert_eq!(together.len(), kinds(dtype).len());
        together.iter().try_for_each(|text| compiler.compile(text, &all)).unwrap();
    }
}

#[test]
fn tpus_take_collectives_of_float32() {
    compiles(Platform::Tpu, DType::F32);
}

#[test]
fn tpus_take_collectives_of_bfloat16() {
    compiles(Platform::Tpu, DType::BF16);
}

#[test]
fn tpus_take_collectives_of_int32() {
    compiles(Platform::Tpu, DType::S32);
}

#[test]
fn gpus_take_collectives_of_float32() {
    compiles(Platform::Cuda, DType::F32);
}

#[test]
fn gpus_take_collectives_of_bfloat16() {
    compiles(Platform::Cuda, DType::BF16);
}

#[test]
fn gpus_take_collectives_of_int32() {
    compiles(Platform::Cuda, DType::S32);
}
