//! The parsers of numbers and choices on the command line.

use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use fsdp_layout::DType;

/// Returns the parser of a number from 1 to `max`.
pub(crate) fn one_to(max: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=max)
}

/// Parses a finite number that is not negative.
pub(crate) fn parse_not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("it must be a finite number that is not negative".to_owned()),
    }
}

/// Parses a finite number above 0.
pub(crate) fn parse_positive(text: &str) -> Result<f64, String> {
    match parse_not_negative(text) {
        Ok(number) if number > 0.0 => Ok(number),
        _ => Err("it must be a finite number above 0".to_owned()),
    }
}

/// Returns the parser of a floating-point dtype. The short form of a name (`bf16`) is taken too.
pub(crate) fn float_type_parser<const N: usize>(
    names: [&'static str; N],
) -> impl TypedValueParser<Value = DType> {
    let values = names.map(|name| PossibleValue::new(name).alias(name.replace("float", "f")));
    PossibleValuesParser::new(values).map(move |text| {
        let mut names = names.into_iter();
        names
            .find(|name| *name == text || name.replace("float", "f") == text)
            .and_then(DType::from_torch_name)
            .expect("clap takes no other name")
    })
}
