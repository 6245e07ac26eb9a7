//! Rank arithmetic of an N-d device mesh: torch's `DeviceMesh` without the devices.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::boxes::{checked_numel, row_major_strides};

/// The reason that a mesh cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceMeshError {
    /// The dimensions do not multiply to the number of ranks.
    #[error("a mesh of shape {shape:?} needs {needed} ranks, but {given} were given")]
    WrongSize {
        /// The shape asked for.
        shape: Vec<usize>,
        /// Its number of ranks.
        needed: usize,
        /// The ranks given.
        given: usize,
    },
    /// The number of names is not the number of dimensions.
    #[error("a mesh of {dims} dimensions needs {dims} names, but {names:?} were given")]
    WrongNames {
        /// Number of dimensions.
        dims: usize,
        /// The names given.
        names: Vec<String>,
    },
}

/// Ranks `0..n` in an N-d array, row-major, with a name for each dimension.
///
/// ```
/// use fsdp_layout::DeviceMesh;
/// let mesh = DeviceMesh::new(&[2, 2], &["replicate", "shard"], 4)?;
/// assert_eq!(mesh.coordinate(2), Some(vec![1, 0]));
/// assert_eq!(mesh.ranks_along(1, 2), Some(vec![2, 3])); // rank 2's shard group
/// assert_eq!(mesh.ranks_along(0, 2), Some(vec![0, 2])); // and its replicas
/// # Ok::<(), fsdp_layout::mesh::DeviceMeshError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMesh {
    shape: Vec<usize>,
    names: Vec<String>,
}

impl DeviceMesh {
    /// Creates a mesh of `shape` over all of `world_size` ranks.
    ///
    /// # Errors
    /// The shape must multiply to `world_size`, and each dimension needs a name.
    pub fn new(
        shape: &[usize],
        names: &[&str],
        world_size: usize,
    ) -> Result<Self, DeviceMeshError> {
        // A shape that overflows needs more ranks than there can be.
        let needed = checked_numel(shape).unwrap_or(usize::MAX);
        if needed != world_size || needed == 0 {
            return Err(DeviceMeshError::WrongSize {
                shape: shape.to_vec(),
                needed,
                given: world_size,
            });
        }
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        if names.len() != shape.len() {
            return Err(DeviceMeshError::WrongNames {
                dims: shape.len(),
                names,
            });
        }
        Ok(DeviceMesh {
            shape: shape.to_vec(),
            names,
        })
    }

    /// Returns the extent of each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the name of each dimension.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the coordinate of a rank; `None` for a rank outside the mesh.
    #[must_use]
    pub fn coordinate(&self, rank: usize) -> Option<Vec<usize>> {
        if rank >= self.size() {
            return None;
        }
        let strides = row_major_strides(&self.shape);
        let dims = strides.iter().zip(&self.shape);
        Some(dims.map(|(stride, dim)| rank / stride % dim).collect())
    }

    /// Returns the ranks that differ from `rank` only along dimension `dim`, in order, including
    /// `rank` itself; `None` for a rank or a dimension that the mesh does not have.
    #[must_use]
    pub fn ranks_along(&self, dim: usize, rank: usize) -> Option<Vec<usize>> {
        let coordinate = self.coordinate(rank)?;
        let size = *self.shape.get(dim)?;
        // Neighbours along a dimension are its stride apart, so the first of them is as many
        // strides before `rank` as its coordinate says.
        let stride = row_major_strides(&self.shape)[dim];
        let first_rank = rank - coordinate[dim] * stride;
        Some((0..size).map(|index| first_rank + index * stride).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_its_own_coordinate() -> Result<(), DeviceMeshError> {
        let mesh = DeviceMesh::new(&[2, 3, 2], &["pp", "dp", "tp"], 12)?;
        for rank in 0..12 {
            let coordinate = mesh.coordinate(rank).unwrap();
            assert_eq!(coordinate[0] * 6 + coordinate[1] * 2 + coordinate[2], rank);
            for dim in 0..3 {
                let along = mesh.ranks_along(dim, rank).unwrap();
                assert_eq!(along[coordinate[dim]], rank);
                assert_eq!(along.len(), mesh.shape()[dim]);
            }
        }
        assert_eq!(mesh.coordinate(12), None);
        assert_eq!(mesh.ranks_along(3, 0), None);
        Ok(())
    }

    #[test]
    fn wrong_meshes_are_refused() {
        assert!(matches!(
            DeviceMesh::new(&[2, 2], &["a", "b"], 3),
            Err(DeviceMeshError::WrongSize { needed: 4, .. })
        ));
        assert!(matches!(
            DeviceMesh::new(&[0], &["a"], 0),
            Err(DeviceMeshError::WrongSize { .. })
        ));
        assert!(matches!(
            DeviceMesh::new(&[2], &[], 2),
            Err(DeviceMeshError::WrongNames { .. })
        ));
    }
}
