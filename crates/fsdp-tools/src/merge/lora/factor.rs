//! The keys of the factors of an adapter's updates.

/// The parsed key of a factor of an update.
pub(super) struct Factor<'k> {
    pub(super) module: &'k str,
    pub(super) is_a: bool,
    pub(super) is_embedding: bool,
}

impl<'k> Factor<'k> {
    /// Parses `MODULE.lora_A.weight`, `MODULE.lora_A.NAME.weight` or `MODULE.lora_embedding_A`;
    /// returns `None` for other keys.
    pub(super) fn parse(name: &'k str) -> Option<Self> {
        for (word, is_a, is_embedding) in [
            (".lora_A", true, false),
            (".lora_B", false, false),
            (".lora_embedding_A", true, true),
            (".lora_embedding_B", false, true),
        ] {
            let Some((module, ending)) = name.split_once(word) else {
                continue;
            };
            // An adapter may have a name, which stands before `weight`.
            let is_weight = match ending.strip_suffix(".weight") {
                _ if is_embedding => !ending.contains(".."),
                Some("") => true,
                Some(name) => name.len() > 1 && name.rfind('.') == Some(0),
                None => false,
            };
            return is_weight.then_some(Factor {
                module,
                is_a,
                is_embedding,
            });
        }
        None
    }

    /// Returns the key of the other factor of the same update.
    pub(super) fn other_key(&self, fqn: &str) -> String {
        let start = if self.is_embedding {
            ".lora_embedding_"
        } else {
            ".lora_"
        };
        let (own_letter, other_letter) = if self.is_a { ("A", "B") } else { ("B", "A") };
        fqn.replacen(
            &format!("{start}{own_letter}"),
            &format!("{start}{other_letter}"),
            1,
        )
    }
}

/// Returns `true` for the key of a factor of an adapter.
pub(in crate::merge) fn is_factor(fqn: &str) -> bool {
    Factor::parse(fqn).is_some()
}
