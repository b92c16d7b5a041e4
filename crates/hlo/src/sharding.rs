//! Meshes of devices and how tensors are cut over them, in Shardy's words.

use crate::error::Error;
use crate::types::{Dims, TensorType};
use std::fmt::{self, Write as _};
use std::sync::Arc;

/// The axes of a grid of devices. Devices are counted along the last axis first.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Mesh {
    axes: Vec<(String, i64)>,
}

/// More devices than this are refused: counts of them are 32-bit numbers for compilers.
const MAX_DEVICES: i64 = 1 << 20;

impl Mesh {
    /// A mesh of these axes with their sizes. Names are words of letters, digits and `_`, each used once.
    pub fn new(axes: &[(&str, i64)]) -> Result<Mesh, Error> {
        let word =
            |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        for (i, (name, size)) in axes.iter().enumerate() {
            if !word(name) || axes[..i].iter().any(|(other, _)| other == name) {
                return Err(broken(format!("`{name}` cannot name an axis, or names two")));
            }
            if *size < 1 {
                return Err(broken(format!("axis `{name}` has size {size}")));
            }
        }
        let devices = axes.iter().try_fold(1i64, |n, (_, size)| n.checked_mul(*size));
        if devices.is_none_or(|n| n > MAX_DEVICES) {
            return Err(broken(format!("a mesh has at most {MAX_DEVICES} devices")));
        }
        Ok(Mesh { axes: axes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect() })
    }

    /// Names and sizes.
    pub fn axes(&self) -> &[(String, i64)] {
        &self.axes
    }

    /// How many devices it has.
    pub fn devices(&self) -> usize {
        self.axes.iter().map(|(_, size)| *size as usize).product()
    }

    /// Where a device is along each axis.
    fn position(&self, device: usize) -> Dims {
        let mut rest = device as i64;
        let mut at = Dims::from_elem(0, self.axes.len());
        for (place, (_, size)) in at.iter_mut().zip(&self.axes).rev() {
            (*place, rest) = (rest % size, rest / size);
        }
        at
    }
}

impl fmt::Display for Mesh {
    /// As Shardy writes it: `<["x"=2, "y"=4]>`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<[")?;
        for (i, (name, size)) in self.axes.iter().enumerate() {
            write!(f, "{}\"{name}\"={size}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]>")
    }
}

/// Along which axes of a mesh each dimension of a tensor is cut, the first of them outermost. Along the other axes
/// devices have the same part.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Sharding {
    mesh: Arc<Mesh>,
    /// Numbers of axes. Dimensions behind the last one that is cut are left out, so that equal shardings are equal.
    dims: Vec<Vec<usize>>,
}

impl Sharding {
    /// A sharding by the names of axes, for each dimension; dimensions that are left out are not cut.
    pub fn new(mesh: &Arc<Mesh>, dims: &[&[&str]]) -> Result<Sharding, Error> {
        let number = |name: &&str| {
            let at = mesh.axes.iter().position(|(axis, _)| axis == name);
            at.ok_or_else(|| broken(format!("the mesh {mesh} has no axis `{name}`")))
        };
        let dim = |axes: &&[&str]| axes.iter().map(number).collect::<Result<Vec<_>, _>>();
        let mut dims = dims.iter().map(dim).collect::<Result<Vec<_>, _>>()?;
        let used: Vec<usize> = dims.iter().flatten().copied().collect();
        if let Some((_, twice)) = used.iter().enumerate().find(|(i, axis)| used[..*i].contains(axis)) {
            return Err(broken(format!("axis `{}` cuts twice", mesh.axes[*twice].0)));
        }
        dims.truncate(dims.iter().rposition(|axes| !axes.is_empty()).map_or(0, |last| last + 1));
        Ok(Sharding { mesh: mesh.clone(), dims })
    }

    /// Each device has the whole tensor.
    pub fn replicated(mesh: &Arc<Mesh>) -> Sharding {
        Sharding { mesh: mesh.clone(), dims: Vec::new() }
    }

    /// Dimension 0 is cut along all axes: each device has a part of its own, in the order of devices.
    pub fn one_each(mesh: &Arc<Mesh>) -> Sharding {
        let all: Vec<usize> = (0..mesh.axes.len()).collect();
        Sharding { mesh: mesh.clone(), dims: if all.is_empty() { Vec::new() } else { vec![all] } }
    }

    /// Its mesh.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// Whether each device has the whole tensor.
    pub fn is_replicated(&self) -> bool {
        self.parts() == 1
    }

    /// Into how many parts a tensor is cut.
    pub fn parts(&self) -> usize {
        (0..self.dims.len()).map(|dim| self.count(dim) as usize).product()
    }

    /// Into how many parts a dimension is cut.
    fn count(&self, dim: usize) -> i64 {
        self.dims.get(dim).into_iter().flatten().map(|&axis| self.mesh.axes[axis].1).product()
    }

    /// The type of the part that each device has. Parts are equal: sizes must be multiples of the number of parts.
    pub fn local(&self, whole: &TensorType) -> Result<TensorType, Error> {
        if self.dims.len() > whole.rank() {
            let (dims, rank) = (self.dims.len(), whole.rank());
            return Err(broken(format!("{self} cuts dimension {}, and {whole} has {rank}", dims - 1)));
        }
        let mut local = whole.clone();
        for (dim, size) in local.shape.iter_mut().enumerate() {
            let count = self.count(dim);
            if *size % count != 0 {
                return Err(broken(format!(
                    "dimension {dim} of {whole} cannot be cut into {count} equal parts"
                )));
            }
            *size /= count;
        }
        Ok(local)
    }

    /// The element at which the part of a device begins, by dimension, where each part has this shape.
    pub fn start(&self, device: usize, local: &[i64]) -> Dims {
        let at = self.mesh.position(device);
        let part = |dim: usize| {
            let axes = self.dims.get(dim).into_iter().flatten();
            axes.fold(0, |part, &axis| part * self.mesh.axes[axis].1 + at[axis])
        };
        local.iter().enumerate().map(|(dim, size)| part(dim) * size).collect()
    }

    /// As Shardy writes it for a tensor of this rank, where its mesh is `@mesh`: `<@mesh, [{"x"}, {}]>`.
    pub(crate) fn text(&self, rank: usize) -> String {
        let mut out = "<@mesh, [".to_owned();
        for dim in 0..rank {
            out.push_str(if dim > 0 { ", {" } else { "{" });
            for (i, &axis) in self.dims.get(dim).into_iter().flatten().enumerate() {
                // Writing to a String does not fail.
                let _ = write!(out, "{}\"{}\"", if i > 0 { ", " } else { "" }, self.mesh.axes[axis].0);
            }
            out.push('}');
        }
        out + "]>"
    }
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.text(self.dims.len()), self.mesh)
    }
}

/// Devices of a program that talk with each other, by their places among its replicas. Each replica is in one group, and
/// all groups have one size: StableHLO wants the first, and compilers abort without the second.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ReplicaGroups(Vec<Vec<i64>>);

impl ReplicaGroups {
    /// Groups of all of `0..replicas`.
    pub fn new(groups: Vec<Vec<i64>>) -> Result<ReplicaGroups, Error> {
        let size = groups.first().map_or(0, Vec::len);
        if size == 0 {
            return Err(broken("a group without a member".to_owned()));
        }
        if let Some(other) = groups.iter().find(|g| g.len() != size) {
            return Err(broken(format!(
                "groups of {size} and of {} members: they must be equal",
                other.len()
            )));
        }
        let mut all: Vec<i64> = groups.iter().flatten().copied().collect();
        all.sort_unstable();
        if all.iter().zip(0..).any(|(member, replica)| *member != replica) {
            let count = all.len();
            return Err(broken(format!(
                "{groups:?} do not have each of the replicas 0 to {} once",
                count - 1
            )));
        }
        Ok(ReplicaGroups(groups))
    }

    /// One group of so many.
    pub fn all(replicas: usize) -> Result<ReplicaGroups, Error> {
        Self::new(vec![(0..replicas as i64).collect()])
    }

    /// Their members.
    pub fn groups(&self) -> &[Vec<i64>] {
        &self.0
    }

    /// How many members each has.
    pub fn size(&self) -> usize {
        self.0[0].len()
    }

    /// How many replicas there are.
    pub fn replicas(&self) -> usize {
        self.0.len() * self.size()
    }
}

fn broken(reason: String) -> Error {
    Error::Sharding { reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn mesh() -> Arc<Mesh> {
        Arc::new(Mesh::new(&[("x", 2), ("y", 4)]).unwrap())
    }

    fn reason<T: fmt::Debug>(result: Result<T, Error>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn parts_are_counted_along_the_axes_of_each_dimension() {
        let whole = TensorType::new(DType::F32, vec![8, 6]);
        let check = |dims: &[&[&str]], parts: usize, local: [i64; 2], starts: [[i64; 2]; 3]| {
            let s = Sharding::new(&mesh(), dims).unwrap();
            let part = s.local(&whole).unwrap();
            assert_eq!((s.parts(), &part.shape[..]), (parts, &local[..]), "{s}");
            for (device, start) in [1, 4, 7].into_iter().zip(starts) {
                assert_eq!(s.start(device, &part.shape)[..], start, "{s}, device {device}");
            }
        };
        check(&[], 1, [8, 6], [[0, 0]; 3]);
        check(&[&["x"]], 2, [4, 6], [[0, 0], [4, 0], [4, 0]]);
        check(&[&["y"], &["x"]], 8, [2, 3], [[2, 0], [0, 3], [6, 3]]);
        check(&[&["x", "y"]], 8, [1, 6], [[1, 0], [4, 0], [7, 0]]);
        check(&[&["y", "x"]], 8, [1, 6], [[2, 0], [1, 0], [7, 0]]);
    }

    #[test]
    fn equal_shardings_are_equal() {
        let of = |dims: &[&[&str]]| Sharding::new(&mesh(), dims).unwrap();
        assert_eq!(of(&[&[], &[]]), Sharding::replicated(&mesh()));
        assert_eq!(of(&[&["x", "y"], &[]]), Sharding::one_each(&mesh()));
        assert!(of(&[]).is_replicated() && !of(&[&["x"]]).is_replicated());
        assert_eq!(of(&[&[], &["y", "x"]]).text(3), r#"<@mesh, [{}, {"y", "x"}, {}]>"#);
        assert_eq!(of(&[&["y"]]).to_string(), r#"<@mesh, [{"y"}]> of <["x"=2, "y"=4]>"#);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for axes in
            [&[("", 2)][..], &[("a\"", 2)], &[("x", 0)], &[("x", 2), ("x", 2)], &[("x", i64::MAX), ("y", 3)]]
        {
            assert!(matches!(Mesh::new(axes), Err(Error::Sharding { .. })), "{axes:?}");
        }
        assert!(reason(Sharding::new(&mesh(), &[&["z"]])).contains("no axis `z`"));
        assert!(reason(Sharding::new(&mesh(), &[&["x"], &["x"]])).contains("`x` cuts twice"));
        let rows = Sharding::new(&mesh(), &[&["y"]]).unwrap();
        let of = |sizes: &[i64]| rows.local(&TensorType::new(DType::F32, sizes));
        assert!(reason(of(&[])).contains("cuts dimension 0"));
        assert!(reason(of(&[6])).contains("cannot be cut into 4 equal parts"));
        assert!(of(&[0]).is_ok());
    }

    #[test]
    fn groups_are_equal_and_have_each_replica_once() {
        let groups = ReplicaGroups::new(vec![vec![0, 2], vec![3, 1]]).unwrap();
        assert_eq!((groups.size(), groups.replicas()), (2, 4));
        let unequal = reason(ReplicaGroups::new(vec![vec![0, 1], vec![2]]));
        assert!(unequal.contains("groups of 2 and of 1"), "{unequal}");
        for wrong in [vec![vec![0, 0]], vec![vec![1, 2]], vec![vec![-1, 0]]] {
            assert!(reason(ReplicaGroups::new(wrong)).contains("once"));
        }
        assert!(ReplicaGroups::new(vec![]).is_err() && ReplicaGroups::all(0).is_err());
    }
}
