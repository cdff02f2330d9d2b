//! Which absolute names a name stands for, given search domains and ndots (resolv.conf(5)).

use hickory_resolver::proto::rr::Name;

/// The absolute names to ask for, in order: with at least `ndots` dots the name itself comes first,
/// else last. `search` has no final dots. Empty when the text cannot be a DNS name.
pub(super) fn absolute_names(text: &str, search: &[String], ndots: usize) -> Vec<Name> {
    let Some(mut name) = dns_name(text) else {
        return Vec::new();
    };
    if name.is_fqdn() {
        return vec![name];
    }
    let searched = |domain| dns_name(&format!("{text}.{domain}."));
    let mut names: Vec<Name> = search.iter().filter_map(searched).collect();
    let is_first = usize::from(name.num_labels()) > ndots;
    name.set_fqdn(true);
    names.insert(if is_first { 0 } else { names.len() }, name);
    names.dedup();
    names
}

/// Letters, digits, `-` (not first) and `_` in labels of 1 to 63, 253 in all, with or without the final dot.
pub(super) fn dns_name(text: &str) -> Option<Name> {
    let name = Name::from_ascii(text).ok()?;
    // The DNS library takes escapes, wildcards and the root as well.
    (name.num_labels() > 0 && !text.contains(['\\', '*'])).then_some(name)
}

/// `localhost` and names below it are this machine (RFC 6761), whatever DNS says.
pub(super) fn is_localhost(text: &str) -> bool {
    dns_name(text).is_some_and(|name| name.is_localhost())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(name: &str, search: &[String], ndots: usize) -> Vec<String> {
        let names = absolute_names(name, search, ndots);
        names.iter().map(Name::to_ascii).collect()
    }

    #[test]
    fn ndots_decides_whether_search_domains_come_first() {
        let search = ["ns.svc.cluster.local", "svc.cluster.local"].map(str::to_owned);
        let searched = |name| search.iter().map(move |domain| format!("{name}.{domain}."));
        // The place of the name itself.
        for (name, ndots, at) in [("web", 5, 2), ("a.b", 1, 0), ("a.b", 2, 2), ("web", 0, 0)] {
            let mut expected: Vec<String> = searched(name).collect();
            expected.insert(at, format!("{name}."));
            let found = names(name, &search, ndots);
            assert_eq!(found, expected, "{name} ndots {ndots}");
        }
        assert_eq!(names("a.b.", &search, 5), ["a.b."]);
        assert_eq!(names("web", &[], 5), ["web."]);
        let long = "a.".repeat(126) + "a";
        assert_eq!(names(&long, &search, 5), [long + "."], "253 characters");
    }

    #[test]
    fn invalid_dns_names_are_never_queried() {
        for name in [
            "",
            ".",
            "a..b",
            "a b",
            "fe80::1%eth0",
            "é",
            "a\\.b",
            "\\141",
            "*.b",
            "-a.b",
            &"x".repeat(64),
            &"a.".repeat(128),
        ] {
            let found = names(name, &["s".to_owned()], 1);
            assert!(found.is_empty(), "{name:?}: {found:?}");
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
