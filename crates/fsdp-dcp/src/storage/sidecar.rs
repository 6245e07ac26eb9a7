//! The small files that lie beside a checkpoint that is one file.

/// A small file that is published together with a checkpoint that is one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sidecar<'b> {
    /// Its name.
    pub(crate) name: &'b str,
    /// Its name until the checkpoint is in its place: `name` with an ending that no other save has.
    pub(crate) pending_name: &'b str,
    /// Its content. If there is none, files that have either name are removed after the commit.
    pub(crate) bytes: Option<&'b [u8]>,
}
