//! The small files that lie beside a checkpoint that is one file.

/// A small file that is published together with a checkpoint that is one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sidecar<'b> {
    /// Its name.
    pub(crate) name: &'b str,
    /// Its name until the checkpoint is in its place: `name`, and an ending of which no other save's is the same.
    pub(crate) pending_name: &'b str,
    /// Its content. Without one, whatever has either name is removed after the commit.
    pub(crate) bytes: Option<&'b [u8]>,
}
