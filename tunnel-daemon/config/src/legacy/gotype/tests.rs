//! Tables of values that Go accepts, and of Go's error messages.

use proptest::prelude::*;

use super::*;

#[test]
fn durations_are_read_as_go_reads_them() {
    for (text, nanos) in [
        ("0", 0),
        ("+0", 0),
        ("-0", 0),
        ("0s", 0),
        ("1h0m0s", 3_600_000_000_000),
        ("1h", 3_600_000_000_000),
        ("500ms", 500_000_000),
        ("1.5h", 5_400_000_000_000),
        (".5s", 500_000_000),
        ("5.s", 5_000_000_000),
        ("-1.5s", -1_500_000_000),
        ("+1s", 1_000_000_000),
        ("1us", 1_000),
        ("1\u{b5}s", 1_000),
        ("1\u{3bc}s", 1_000),
        ("3ns", 3),
        ("1m1m", 120_000_000_000),
        ("0.000000001s", 1),
        ("0.3333333333333333333h", 1_200_000_000_000 - 1),
        ("9223372036854775807ns", i64::MAX),
        ("-9223372036854775808ns", i64::MIN),
    ] {
        assert_eq!(GoDuration::parse(text), Ok(GoDuration(nanos)), "{text}");
    }
}

#[test]
fn bad_durations_have_gos_error_texts() {
    for (text, message) in [
        ("", "time: invalid duration \"\""),
        ("-", "time: invalid duration \"-\""),
        ("s", "time: invalid duration \"s\""),
        (".s", "time: invalid duration \".s\""),
        ("1.2.3s", "time: missing unit in duration \"1.2.3s\""),
        ("5", "time: missing unit in duration \"5\""),
        ("1h5", "time: missing unit in duration \"1h5\""),
        ("5y", "time: unknown unit \"y\" in duration \"5y\""),
        ("5 s", "time: unknown unit \" s\" in duration \"5 s\""),
        (
            "9223372036854775808ns",
            "time: invalid duration \"9223372036854775808ns\"",
        ),
        ("99999999999h", "time: invalid duration \"99999999999h\""),
    ] {
        assert_eq!(GoDuration::parse(text), Err(message.to_owned()), "{text}");
    }
}

#[test]
fn durations_are_shown_as_go_shows_them() {
    for (nanos, shown) in [
        (0, "0s"),
        (1, "1ns"),
        (1_100, "1.1\u{b5}s"),
        (2_200_000, "2.2ms"),
        (500_000_000, "500ms"),
        (1_500_000_000, "1.5s"),
        (60_000_000_000, "1m0s"),
        (3_600_000_000_000, "1h0m0s"),
        (-90_000_000_000, "-1m30s"),
        (i64::MIN, "-2562047h47m16.854775808s"),
    ] {
        assert_eq!(GoDuration(nanos).to_string(), shown);
    }
}

#[test]
fn booleans_are_gos_twelve_words() {
    for text in ["1", "t", "T", "TRUE", "true", "True"] {
        assert_eq!(parse_bool(text), Ok(true));
    }
    for text in ["0", "f", "F", "FALSE", "false", "False"] {
        assert_eq!(parse_bool(text), Ok(false));
    }
    for text in ["", "yes", "on", "tRUE", " true"] {
        assert_eq!(
            parse_bool(text),
            Err(format!(
                "strconv.ParseBool: parsing {text:?}: invalid syntax"
            ))
        );
    }
}

#[test]
fn integers_take_gos_prefixes_and_underscores() {
    for (text, value) in [
        ("8090", 8090),
        ("-1", -1),
        ("+7", 7),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 15),
        ("0b101", 5),
        ("1_000", 1000),
        ("0x_1F", 31),
        ("9223372036854775807", i64::MAX),
        ("-9223372036854775808", i64::MIN),
    ] {
        assert_eq!(parse_int(text), Ok(value), "{text}");
    }
    for text in [
        "", "-", "abc", "1.5", "08", "0x", "1_", "_1", "1__0", "--1", "\u{661}",
    ] {
        assert_eq!(
            parse_int(text),
            Err(format!(
                "strconv.ParseInt: parsing {text:?}: invalid syntax"
            ))
        );
    }
    let error = parse_int("9223372036854775808").unwrap_err();
    assert_eq!(
        error,
        "strconv.ParseInt: parsing \"9223372036854775808\": value out of range"
    );
    assert!(parse_uint("-1").is_err());
}

#[test]
fn floats_are_single_precision() {
    assert_eq!(parse_float("2.5"), Ok(2.5));
    assert_eq!(
        parse_float("x").unwrap_err(),
        "strconv.ParseFloat: parsing \"x\": invalid syntax"
    );
    assert_eq!(
        parse_float("1e99").unwrap_err(),
        "strconv.ParseFloat: parsing \"1e99\": value out of range"
    );
}

#[test]
fn lists_are_one_csv_record() {
    for (text, items) in [
        ("", vec![]),
        ("[]", vec![]),
        ("a", vec!["a"]),
        ("a,b", vec!["a", "b"]),
        ("a,,b,", vec!["a", "", "b", ""]),
        ("\"a,b\",c", vec!["a,b", "c"]),
        ("\"a\"\"b\"", vec!["a\"b"]),
        ("\"\"", vec![""]),
    ] {
        assert_eq!(parse_list(text).unwrap(), items, "{text}");
    }
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        ("a\"b", "parse error on line 1, column 2: bare \" in non-quoted-field"),
        ("x,a\"b", "parse error on line 1, column 4: bare \" in non-quoted-field"),
        ("\"a", "parse error on line 1, column 3: extraneous or missing \" in quoted-field"),
        ("\"a\"b", "parse error on line 1, column 3: extraneous or missing \" in quoted-field"),
    ];
    for (text, message) in cases {
        assert_eq!(parse_list(text), Err(message.to_owned()), "{text}");
    }
}

#[test]
fn severities_are_names_or_numbers() {
    for (text, severity) in [
        ("INFO", 0),
        ("warning", 1),
        ("2", 2),
        ("FATAL", 3),
        ("-1", -1),
    ] {
        assert_eq!(parse_severity(text), Ok(severity));
    }
    assert!(parse_severity("loud").is_err());
}

proptest! {
    #[test]
    fn duration_text_round_trips(nanos in (i64::MIN + 1)..i64::MAX) {
        prop_assert_eq!(GoDuration::parse(&GoDuration(nanos).to_string()), Ok(GoDuration(nanos)));
    }

    #[test]
    fn go_value_parsers_never_panic(text in ".{0,40}") {
        let _ = (GoDuration::parse(&text), parse_int(&text), parse_uint(&text), parse_float(&text));
        let _ = (parse_list(&text), parse_bool(&text), parse_severity(&text));
    }

    #[test]
    fn duration_like_text_never_panics(text in "[-+]?([0-9]{0,25}(\\.[0-9]{0,25})?(ns|us|ms|s|m|h|y)?){0,4}") {
        let _ = GoDuration::parse(&text);
    }
}
