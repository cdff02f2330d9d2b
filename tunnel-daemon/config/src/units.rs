//! Durations, sizes, numbers, ports and addresses in native flags. Errors say what to write: clap puts flag and value before them.

use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
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
            parsed => parsed.map_err(|_no_time| "write 500ms, 25s, 5m or 1h30m".to_owned()),
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

/// A parser of whole numbers within these bounds.
pub(crate) fn number<T>(
    bounds: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| {
        let number = text.parse().ok().filter(|number| bounds.contains(number));
        number.ok_or_else(|| {
            let (min, max) = (bounds.start(), bounds.end());
            format!("write a whole number from {min} to {max}")
        })
    }
}

/// The port of a listener; 0 lets the kernel choose.
pub(crate) fn listener_port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_no_port| {
        "write a port, a number from 1 to 65535, or 0 to let the kernel choose".to_owned()
    })
}

/// A port to connect to.
pub(crate) fn port(text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| "write a port, a number from 1 to 65535".to_owned())
}

/// An IP address.
pub(crate) fn ip(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_no_address| "write an IP address, such as 10.0.0.1 or fd00::1".to_owned())
}

/// A duration, where zero means no limit.
pub(crate) fn limit(text: &str) -> Result<Option<Duration>, String> {
    Ok(Some(duration(text)?).filter(|time| !time.is_zero()))
}
