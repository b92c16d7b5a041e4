//! Tensors: their types, and what they are for.

use oxitorch_hlo::{DType, TensorType as HloType};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Dtype and shape, written as PyTorch's users write them: `float32[64, 32]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorType {
    /// The type of an element.
    pub dtype: DType,
    /// The size of each dimension.
    pub shape: Vec<u64>,
}

impl TensorType {
    /// Bytes of all elements, without padding.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size_bytes() as u64
    }
}

impl From<&HloType> for TensorType {
    fn from(ty: &HloType) -> TensorType {
        TensorType { dtype: ty.dtype, shape: ty.shape.iter().map(|&n| n.max(0) as u64).collect() }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype.torch_name(), self.shape)
    }
}

impl FromStr for TensorType {
    type Err = String;

    fn from_str(text: &str) -> Result<TensorType, String> {
        let wrong = || format!("`{text}` is no type of a tensor, such as `float32[64, 32]`");
        let (dtype, rest) = text.split_once('[').ok_or_else(wrong)?;
        let sizes = rest.strip_suffix(']').ok_or_else(wrong)?;
        let sizes = sizes.split(',').map(str::trim).filter(|n| !n.is_empty());
        Ok(TensorType {
            dtype: DType::from_torch_name(dtype).ok_or_else(wrong)?,
            shape: sizes.map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?,
        })
    }
}

impl Serialize for TensorType {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TensorType {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<TensorType, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A dtype by PyTorch's name, for `#[serde(with = "...")]`.
pub(crate) mod dtype {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.torch_name())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DType, D::Error> {
        let name = String::deserialize(from)?;
        DType::from_torch_name(&name).ok_or_else(|| serde::de::Error::custom(format!("no dtype `{name}`")))
    }
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A parameter of a model.
    Parameter,
    /// The gradient of a parameter.
    Gradient,
    /// What an optimizer keeps for a parameter.
    State,
    /// A buffer of a module.
    Buffer,
    /// It came from the host in this step.
    Data,
    /// Another program made it in this step.
    Intermediate,
    /// A number that goes along with a launch.
    Number,
    /// It was there before the step.
    #[default]
    Other,
}

impl Role {
    /// In the order of declaration.
    pub const ALL: [Role; 8] = [
        Role::Parameter,
        Role::Gradient,
        Role::State,
        Role::Buffer,
        Role::Data,
        Role::Intermediate,
        Role::Number,
        Role::Other,
    ];

    /// In a word, as it is written and shown.
    pub fn name(self) -> &'static str {
        match self {
            Role::Parameter => "parameter",
            Role::Gradient => "gradient",
            Role::State => "state",
            Role::Buffer => "buffer",
            Role::Data => "data",
            Role::Intermediate => "intermediate",
            Role::Number => "number",
            Role::Other => "other",
        }
    }

    /// The role of this name.
    pub fn from_name(name: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|r| r.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A role, and what Python calls the tensor, such as the name of a parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Label {
    /// What it is for.
    pub role: Role,
    /// What Python calls it, if it has a name there.
    pub name: Option<String>,
}

impl From<Role> for Label {
    fn from(role: Role) -> Label {
        Label { role, name: None }
    }
}

/// A tensor that is alive while a program runs that does not take it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beside {
    /// What it is for.
    #[serde(flatten)]
    pub label: Label,
    /// The size of each dimension.
    pub shape: Vec<u64>,
    /// What it takes on the device.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_the_same_after_writing_and_reading() {
        for dtype in DType::all() {
            for shape in [vec![], vec![0], vec![64, 32]] {
                let ty = TensorType { dtype, shape };
                assert_eq!(ty.to_string().parse(), Ok(ty.clone()));
                assert_eq!(
                    serde_json::from_str::<TensorType>(&serde_json::to_string(&ty).unwrap()).unwrap(),
                    ty
                );
            }
        }
        assert_eq!("float32[64, 32]".parse::<TensorType>().unwrap().bytes(), 64 * 32 * 4);
        for text in ["", "float32", "float32[", "float33[1]", "float32[a]", "float32[-1]"] {
            assert!(text.parse::<TensorType>().is_err(), "{text}");
        }
    }

    #[test]
    fn roles_are_written_as_they_are_named() {
        for role in Role::ALL {
            assert_eq!(serde_json::to_value(role).unwrap(), role.name());
            assert_eq!(Role::from_name(role.name()), Some(role));
        }
    }
}
