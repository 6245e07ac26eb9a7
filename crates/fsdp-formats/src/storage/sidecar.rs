//! The small files that lie beside a checkpoint that is one file.

use std::path::Path;

use crate::error::FileError;

/// A small file that is published together with a checkpoint that is one file.
#[derive(Clone, Copy)]
pub struct Sidecar<'b> {
    /// Its name.
    pub name: &'b str,
    /// Its name until the checkpoint is in its place: `name` with an ending that no save of another
    /// content has.
    pub pending_name: &'b str,
    /// Its content, if there is a sidecar.
    pub bytes: Option<&'b [u8]>,
    /// Returns `true` for the name of a file beside the checkpoint that nothing needs once the
    /// checkpoint is in its place. All others must stay: another checkpoint's sidecar may have the
    /// same name, and so may a user's file.
    pub is_unneeded: &'b dyn Fn(&str) -> bool,
}

impl Sidecar<'_> {
    /// Returns those of the names in the directory `parent` whose files may be replaced or removed
    /// by the commit.
    ///
    /// # Errors
    /// [`FileError::HoldsOthers`] if the sidecar would replace a file that must stay.
    pub fn find_unneeded(
        &self,
        parent: &Path,
        names: Vec<String>,
    ) -> Result<Vec<String>, FileError> {
        let mut unneeded = Vec::new();
        for name in names.into_iter().filter(|name| name.starts_with(self.name)) {
            if (self.is_unneeded)(&name) {
                unneeded.push(name);
            } else if self.bytes.is_some() && name == self.name {
                return Err(FileError::HoldsOthers {
                    path: parent.to_owned(),
                    name,
                });
            }
        }
        Ok(unneeded)
    }
}
