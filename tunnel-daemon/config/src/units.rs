//! Durations and sizes in native flags.

use std::time::Duration;

use crate::limits;

/// `25s`, `5m`, `1h30m`, `0`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match text {
        "0" => Ok(Duration::ZERO),
        text => match humantime::parse_duration(text) {
            Ok(time) if time > limits::DURATION_MAX => {
                Err("write no more than a hundred years".to_owned())
            }
            parsed => parsed.map_err(|error| format!("{error}; write 500ms, 25s, 5m or 1h30m")),
        },
    }
}

/// `65536`, `64KiB`, `4MiB`, `2GiB`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a size: write 65536, 64KiB, 4MiB or 2GiB");
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim_start() {
        "" | "B" => 1,
        "KiB" | "Ki" => limits::KIB,
        "MiB" | "Mi" => limits::MIB,
        "GiB" | "Gi" => 1024 * limits::MIB,
        _ => return Err(bad()),
    };
    let number: u64 = number.parse().map_err(|_not_a_number| bad())?;
    number.checked_mul(scale).ok_or_else(bad)
}

/// A duration, where zero means no limit.
pub(crate) fn limit(text: &str) -> Result<Option<Duration>, String> {
    Ok(Some(duration(text)?).filter(|time| !time.is_zero()))
}
