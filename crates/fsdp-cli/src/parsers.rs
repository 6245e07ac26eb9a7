//! The parsers of numbers and choices on the command line.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fsdp_layout::DType;

/// Returns the parser of a floating-point dtype. The short form of a name (`bf16`) is taken too.
pub(crate) fn float_types<const N: usize>(
    names: [&'static str; N],
) -> impl TypedValueParser<Value = DType> {
    let values = names.map(|name| PossibleValue::new(name).alias(name.replace("float", "f")));
    PossibleValuesParser::new(values).map(move |given| {
        let is_given = |name: &&str| *name == given || name.replace("float", "f") == given;
        let name = names.into_iter().find(is_given);
        name.and_then(DType::from_torch_name)
            .expect("clap takes no other name")
    })
}
