//! Groups of some ranks of a group.

use fsdp_layout::DeviceMesh;

use crate::collectives::check;
use crate::error::CommError;
use crate::group::ProcessGroup;
use crate::record::{Call, Operation};

impl ProcessGroup {
    /// Creates a group of some of this group's ranks: torch's `new_group`. Every rank of this group
    /// must call it with the same ranks, in any order. Ranks outside the new group get `None`. In
    /// the new group, ranks are numbered in ascending order.
    ///
    /// # Errors
    /// An empty list, ranks that are repeated or outside this group, and lists that differ between
    /// callers.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<ProcessGroup>, CommError> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        let call = Call {
            sizes: ranks.clone(),
            ..Call::new(Operation::Subgroup)
        };
        let arguments = check(&call, || {
            if ranks.is_empty() {
                return Err("a group needs at least one rank".to_owned());
            }
            if let Some(twice) = ranks.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(format!("rank {} is given twice", twice[0]));
            }
            match ranks.iter().find(|&&rank| rank >= self.world_size()) {
                Some(rank) => Err(format!(
                    "there is no rank {rank} in a group of {}",
                    self.world_size()
                )),
                None => Ok(()),
            }
        });
        let mut turn = self.begin(call, arguments)?;
        turn.round(None, Vec::new(), &[], |_| Ok(None))?;
        let id = child_id(self.id(), turn.call.sequence, &ranks);
        ranks
            .contains(&self.rank())
            .then(|| turn.child(id, &ranks))
            .transpose()
    }

    /// Creates the group of the ranks that differ from this one only along dimension `dim` of a
    /// mesh over this group: torch's `DeviceMesh.get_group(dim)`. All groups of that dimension are
    /// made at once, so every rank of this group must call it.
    ///
    /// # Errors
    /// A mesh of another size or without that dimension; meshes or dimensions that differ between
    /// callers.
    pub fn mesh_group(&self, mesh: &DeviceMesh, dim: usize) -> Result<ProcessGroup, CommError> {
        let sizes = mesh.shape().iter().copied().chain([dim]).collect();
        let call = Call {
            sizes,
            ..Call::new(Operation::MeshGroup)
        };
        let ranks = mesh
            .ranks_along(dim, self.rank())
            .filter(|_| mesh.size() == self.world_size());
        let arguments = check(&call, || match ranks {
            Some(_) => Ok(()),
            None => Err(format!(
                "dimension {dim} of a mesh of shape {:?} does not exist over {} ranks",
                mesh.shape(),
                self.world_size()
            )),
        });
        let mut turn = self.begin(call, arguments)?;
        turn.round(None, Vec::new(), &[], |_| Ok(None))?;
        let ranks = ranks.unwrap_or_default();
        turn.child(child_id(self.id(), turn.call.sequence, &ranks), &ranks)
    }
}

/// Returns a number that no two groups of a job share: FNV-1a over the parent, its operation and
/// the ranks.
fn child_id(parent: u64, sequence: u64, ranks: &[usize]) -> u64 {
    let words = [parent, sequence]
        .into_iter()
        .chain(ranks.iter().map(|&rank| rank as u64));
    words
        .flat_map(u64::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
}
