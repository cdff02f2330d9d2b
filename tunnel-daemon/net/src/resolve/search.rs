//! Which absolute names a name stands for, given search domains and ndots (resolv.conf(5)).

/// The absolute names to ask for, in order: with at least `ndots` dots the name itself comes first,
/// otherwise last. `search` has no final dots. Empty when the text cannot be a DNS name.
pub(super) fn absolute_names(name: &str, search: &[String], ndots: usize) -> Vec<String> {
    if !is_dns_name(name) {
        return Vec::new();
    }
    if name.ends_with('.') {
        return vec![name.to_owned()];
    }
    let own = format!("{name}.");
    let searched = search.iter().map(|domain| format!("{name}.{domain}."));
    let mut names: Vec<String> = searched.filter(|name| is_dns_name(name)).collect();
    let dots = name.bytes().filter(|b| *b == b'.').count();
    names.insert(if dots >= ndots { 0 } else { names.len() }, own);
    names.dedup();
    names
}

/// Letters, digits, `-` and `_` in labels of 1 to 63, 253 in all, with or without the final dot.
pub(super) fn is_dns_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        })
}

/// `localhost` and names below it are this machine (RFC 6761), whatever DNS says.
pub(super) fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let last = name.rsplit('.').next().unwrap_or(name);
    last.eq_ignore_ascii_case("localhost") && is_dns_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ndots_decides_whether_search_domains_come_first() {
        let search = [
            "ns.svc.cluster.local".to_owned(),
            "svc.cluster.local".to_owned(),
        ];
        for (name, ndots, expected) in [
            (
                "web",
                5,
                vec![
                    "web.ns.svc.cluster.local.",
                    "web.svc.cluster.local.",
                    "web.",
                ],
            ),
            (
                "a.b",
                1,
                vec![
                    "a.b.",
                    "a.b.ns.svc.cluster.local.",
                    "a.b.svc.cluster.local.",
                ],
            ),
            (
                "a.b",
                2,
                vec![
                    "a.b.ns.svc.cluster.local.",
                    "a.b.svc.cluster.local.",
                    "a.b.",
                ],
            ),
            (
                "web",
                0,
                vec![
                    "web.",
                    "web.ns.svc.cluster.local.",
                    "web.svc.cluster.local.",
                ],
            ),
            ("a.b.", 5, vec!["a.b."]),
        ] {
            assert_eq!(
                absolute_names(name, &search, ndots),
                expected,
                "{name} ndots {ndots}"
            );
        }
        assert_eq!(absolute_names("web", &[], 5), ["web."]);
    }

    #[test]
    fn what_is_no_dns_name_is_never_asked_for() {
        for name in [
            "",
            ".",
            "a..b",
            "a b",
            "fe80::1%eth0",
            "é",
            "a\\.b",
            &"x".repeat(64),
            &"a.".repeat(128),
        ] {
            assert_eq!(
                absolute_names(name, &["s".to_owned()], 1),
                Vec::<String>::new(),
                "{name:?}"
            );
        }
    }

    #[test]
    fn localhost_is_recognised_in_any_spelling() {
        for name in ["localhost", "LocalHost.", "db.localhost"] {
            assert!(is_localhost(name), "{name}");
        }
        for name in ["localhost.example", "notlocalhost", ".localhost", ""] {
            assert!(!is_localhost(name), "{name}");
        }
    }
}
