//! eBPF programs keep to what the kernel promises to user space, and say on top what they are and what they take.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use toml::Table;

use crate::tidy::paths::{NamedPath, paths};
use crate::workspace::Workspace;

const PROGRAMS: &str = "ebpf-programs/programs";
/// Packages whose code ends in an object, and the crates each may use. Another one may bring bindings of one kernel.
const PACKAGES: &[(&str, &[&str])] = &[
    (PROGRAMS, &["adit-ebpf-abi", "aya-ebpf"]),
    ("ebpf-programs/abi", &[]),
];

/// Contexts of the kernel's stable interface, by the names of aya.
const CONTEXTS: &[&str] = &[
    "SkBuffContext",
    "SkMsgContext",
    "SockAddrContext",
    "SockOpsContext",
];
/// Attributes of programs that get one of these contexts.
const HOOKS: &[&str] = &["cgroup_sock_addr", "sk_msg", "sock_ops", "stream_verdict"];
/// Of the bindings, what is neither a constant nor a struct of one kernel.
const BINDINGS: &[&str] = &["bpf_sock_ops", "bpf_sock_tuple", "sk_action"];
/// How names begin that lead to a struct of the kernel, or to code that this check does not see.
const FOREIGN: &[&str] = &[
    "bpf_copy_from_user",
    "bpf_core_",
    "bpf_get_current_task",
    "bpf_probe_read",
    "bpf_skc_to_",
    "container_of",
    "include",
    "read_kernel",
    "read_unaligned",
    "transmute",
    "vmlinux",
];
/// Methods that lead from one place in memory to another by a number.
const STEPS: &[&str] = &[
    "add",
    "byte_add",
    "byte_offset",
    "byte_sub",
    "offset",
    "sub",
    "with_addr",
    "wrapping_byte_add",
    "wrapping_byte_offset",
    "wrapping_byte_sub",
    "wrapping_offset",
];
/// Pointers to memory of the program itself, on which that is done: file and name.
const OWN_POINTERS: &[(&str, &str)] =
    &[("ebpf-programs/programs/src/redirect_connect.rs", "tuple")];

/// What the first lines of a program say: how that may begin, and what it is.
const HEAD: &[(&[&str], &str)] = &[
    (&["Hook: ", "Hooks: "], "its hook"),
    (&["Floor: Linux "], "its kernel floor"),
    (&["Licence: "], "its licence"),
    (
        &["Map, entries at most: ", "Maps, entries at most: "],
        "its maps and their sizes",
    ),
    (&["Missing "], "what it does when something is missing"),
];

/// Behind this are maps and their sizes.
const SIZES: &str = "entries at most: ";

/// Checks the programs and what they share with the daemon.
///
/// # Errors
/// When a source cannot be read or is no Rust, or a manifest no TOML.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (mut findings, mut sources) = (Vec::new(), Vec::new());
    for (package, allowed) in PACKAGES {
        findings.extend(crates(workspace, package, allowed)?);
        for file in workspace.files(package)? {
            if file.ends_with(".rs") {
                let text = workspace.text(&file)?.unwrap_or_default();
                sources.push(Source::read(file, &text)?);
            }
        }
    }
    let known = Known::of(&sources);
    for source in &sources {
        findings.extend(source.names());
        findings.extend(source.steps(&known));
        findings.extend(source.head(&known));
    }
    Ok(findings)
}

fn crates(workspace: &Workspace, package: &str, allowed: &[&str]) -> anyhow::Result<Vec<String>> {
    let file = format!("{package}/Cargo.toml");
    let manifest: Table = toml::from_str(&workspace.text(&file)?.unwrap_or_default())?;
    let used = manifest.get("dependencies").and_then(|all| all.as_table());
    let names = used.into_iter().flat_map(Table::keys);
    let foreign = names.filter(|name| !allowed.contains(&name.as_str()));
    Ok(foreign
        .map(|name| format!("{file}: `{name}` is no crate that programs may use"))
        .collect())
}

/// A token: a word, a sign, a literal, or one end of a group.
struct Word {
    text: String,
    line: usize,
}

struct Source {
    file: String,
    /// Its first lines of documentation, as one.
    head: String,
    paths: Vec<NamedPath>,
    words: Vec<Word>,
}

/// What all sources together declare.
struct Known {
    structs: Vec<String>,
    /// Maps, with the number of entries where that is a number.
    maps: Vec<(String, Option<String>)>,
}

impl Source {
    fn read(file: String, text: &str) -> anyhow::Result<Self> {
        let head = text.lines().map_while(|line| line.strip_prefix("//!"));
        let head: Vec<&str> = head.map(str::trim).collect();
        let paths = paths(text).map_err(|error| error.context(file.clone()))?;
        let stream: TokenStream = text
            .parse()
            .map_err(|error| anyhow::anyhow!("{file}: not Rust tokens: {error}"))?;
        let mut words = Vec::new();
        spread(stream, &mut words);
        Ok(Self {
            head: head.join(" "),
            file,
            paths,
            words,
        })
    }

    /// The words from each place on, with their line.
    fn places(&self) -> impl Iterator<Item = (usize, Vec<&str>)> {
        /// Words of the longest pattern.
        const MOST: usize = 6;
        self.words.iter().enumerate().map(move |(at, word)| {
            let here = self.words.iter().skip(at).take(MOST);
            (word.line, here.map(|word| word.text.as_str()).collect())
        })
    }

    /// Names of what no program may use.
    fn names(&self) -> Vec<String> {
        let foreign = self.paths.iter().filter_map(|path| {
            let why = foreign(&path.segments)?;
            Some(format!("{}:{}: {why}", self.file, path.line))
        });
        foreign.collect()
    }

    /// Ways to an offset that was written down here.
    fn steps(&self, known: &Known) -> Vec<String> {
        let mut findings = Vec::new();
        for (line, words) in self.places() {
            let why = match *words.as_slice() {
                ["as", "*", ..] => {
                    "a pointer that is cast; `cast` to a type of the stable interface"
                }
                [on, ".", step, "(", ..]
                    if STEPS.contains(&step)
                        && !OWN_POINTERS.contains(&(self.file.as_str(), on)) =>
                {
                    "a pointer that is moved by a number, and not to the program's own memory"
                }
                ["offset_of", "!", "(", of, ..] if !known.structs.iter().any(|own| own == of) => {
                    "an offset of a struct that is not ours"
                }
                ["struct", name, ..] if name.starts_with(|c: char| c.is_ascii_lowercase()) => {
                    "a struct with a name as the kernel's have"
                }
                _ => continue,
            };
            findings.push(format!("{}:{line}: {why}", self.file));
        }
        findings
    }

    /// What the first lines of a program leave out.
    fn head(&self, known: &Known) -> Vec<String> {
        let is_hook = |path: &NamedPath| {
            let named: Vec<&str> = path.segments.iter().map(String::as_str).collect();
            matches!(*named.as_slice(), ["aya_ebpf", "macros", hook] if hook != "map")
        };
        if !self.paths.iter().any(is_hook) {
            return Vec::new();
        }
        let mut findings = Vec::new();
        for (beginnings, what) in HEAD {
            if !beginnings.iter().any(|begin| self.head.contains(begin)) {
                let wanted = beginnings.join("` or `");
                findings.push(format!(
                    "{}:1: a program does not say {what}: `{wanted}`",
                    self.file
                ));
            }
        }
        let Some((_, sizes)) = self.head.split_once(SIZES) else {
            return findings; // Said above.
        };
        for (map, entries) in &known.maps {
            if !self.words.iter().any(|word| word.text == *map) {
                continue;
            }
            let said = said(sizes, map);
            if said.is_none() || entries.is_some() && *entries != said {
                findings.push(format!(
                    "{}:1: a program does not say how large {map} is: {}",
                    self.file,
                    entries.as_deref().unwrap_or("a number")
                ));
            }
        }
        findings
    }
}

/// Why a program may not name that.
fn foreign(segments: &[String]) -> Option<String> {
    let named: Vec<&str> = segments.iter().map(String::as_str).collect();
    if let Some(name) = named
        .iter()
        .find(|name| FOREIGN.iter().any(|begin| name.starts_with(begin)))
    {
        return Some(format!(
            "`{name}` leads to structs of one kernel, or past this check"
        ));
    }
    let is_constant = |name: &str| name.starts_with(|c: char| c.is_ascii_uppercase());
    match *named.as_slice() {
        ["aya_ebpf"] | ["aya_ebpf", "*" | "programs" | "macros" | "bindings"] => {
            Some("programs name items of aya_ebpf, not its modules".to_owned())
        }
        ["aya_ebpf", "programs", name, ..] if !CONTEXTS.contains(&name) => Some(format!(
            "`{name}` is no context that the kernel promises to user space"
        )),
        ["aya_ebpf", "macros", name, ..] if name != "map" && !HOOKS.contains(&name) => Some(
            format!("`{name}` is no hook whose context the kernel promises to user space"),
        ),
        ["aya_ebpf", "bindings", name, ..] if !is_constant(name) && !BINDINGS.contains(&name) => {
            Some(format!(
                "`{name}` is no struct that the kernel promises to user space"
            ))
        }
        _ => None,
    }
}

/// The first number behind a name.
fn said(sizes: &str, name: &str) -> Option<String> {
    let (_, behind) = sizes.split_once(name)?;
    let from = behind.find(|c: char| c.is_ascii_digit())?;
    let number = behind.chars().skip(from);
    let number = number.take_while(|c| c.is_ascii_digit() || *c == ',');
    Some(number.filter(char::is_ascii_digit).collect())
}

impl Known {
    fn of(sources: &[Source]) -> Self {
        let (mut structs, mut numbers, mut maps) = (Vec::new(), Vec::new(), Vec::new());
        for source in sources {
            for (_line, words) in source.places() {
                match *words.as_slice() {
                    ["struct", name, ..] => structs.push(name.to_owned()),
                    ["const", name, ":", _, "=", value] => {
                        numbers.push((name, value.replace('_', "")));
                    }
                    _ => (),
                }
            }
            maps.extend(source.maps());
        }
        let resolve = |entries: &str| {
            let value = entries.replace('_', "");
            if value.chars().all(|c| c.is_ascii_digit()) && !value.is_empty() {
                return Some(value);
            }
            let known = numbers.iter().find(|(name, _)| *name == entries);
            known.map(|(_, value)| value.clone())
        };
        let maps = maps
            .into_iter()
            .map(|(map, entries)| (map, entries.and_then(|entries| resolve(&entries))))
            .collect();
        Self { structs, maps }
    }
}

impl Source {
    /// Maps and what is written for their number of entries.
    fn maps(&self) -> Vec<(String, Option<String>)> {
        let mut found: Vec<(String, Option<String>)> = Vec::new();
        let mut is_map = false;
        for (_line, words) in self.places() {
            match *words.as_slice() {
                ["[", "map", "]", ..] => is_map = true,
                ["static", name, ..] if is_map => found.push((name.to_owned(), None)),
                ["with_max_entries", "(", entries, ",", ..] if is_map => {
                    if let Some((_, last)) = found.last_mut() {
                        *last = Some(entries.to_owned());
                    }
                }
                [";", ..] => is_map = false,
                _ => (),
            }
        }
        found
    }
}

fn spread(stream: TokenStream, found: &mut Vec<Word>) {
    for token in stream {
        let line = token.span().start().line;
        let mut push = |text: String| found.push(Word { text, line });
        match token {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                push(open.to_owned());
                spread(group.stream(), found);
                found.push(Word {
                    text: close.to_owned(),
                    line,
                });
            }
            TokenTree::Ident(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => {
                push(token.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const MANIFEST: &str =
        "[dependencies]\nadit-ebpf-abi = { path = \"../abi\" }\naya-ebpf = \"=0.2.1\"\n";
    const LIMITS: &str = "//! Limits.\npub const WORDS_MAX: u32 = 16_384;\npub struct Entry;\n";
    const TABLES: &str = "//! Maps.\n#[map]\npub static WORDS: HashMap<u64, u64> = HashMap::with_max_entries(WORDS_MAX, 0);\n";
    const HEAD: &str = "//! Counts.\n//!\n//! Hook: cgroup `sock_ops`. Floor: Linux 5.8. Licence: any. Map, entries\n\
                        //! at most: WORDS 16,384. Missing it: nothing is counted.\n";
    const HOOK: &str = "use aya_ebpf::macros::sock_ops;\nuse aya_ebpf::programs::SockOpsContext;\nuse crate::tables::WORDS;\n";

    /// What is found in a program of these lines, behind its ordinary ones.
    fn found_in(program: &str) -> Vec<String> {
        found(HEAD, &format!("{HOOK}{program}"), MANIFEST)
    }

    fn found(head: &str, program: &str, manifest: &str) -> Vec<String> {
        let count = format!("{head}{program}");
        let (_folder, workspace) = sample(&[
            ("ebpf-programs/abi/Cargo.toml", ""),
            ("ebpf-programs/abi/src/lib.rs", LIMITS),
            ("ebpf-programs/programs/Cargo.toml", manifest),
            ("ebpf-programs/programs/src/tables.rs", TABLES),
            ("ebpf-programs/programs/src/count.rs", count.as_str()),
        ]);
        check(&workspace).unwrap()
    }

    #[test]
    fn contexts_of_the_stable_interface_are_fine() {
        let text = "use aya_ebpf::bindings::{BPF_TCP_CLOSE, bpf_sock_ops};\nuse aya_ebpf::bindings::sk_action::SK_PASS;\n\
                    // bpf_probe_read\nfn f(ops: *mut bpf_sock_ops) -> u64 { let at = offset_of!(Entry, a); a.wrapping_sub(at) }\n";
        assert_eq!(found_in(text), Vec::<String>::new());
    }

    #[test]
    fn whatever_leads_to_a_struct_of_the_kernel_is_found() {
        for text in [
            "use aya_ebpf::helpers::bpf_probe_read_kernel;",
            "use aya_ebpf::helpers::generated::bpf_probe_read;",
            "fn f() { unsafe { aya_ebpf::helpers::bpf_probe_read_kernel_buf(a, b) } }",
            "fn f() { unsafe { aya_ebpf::helpers::generated::bpf_get_current_task_btf() } }",
            "fn f() { unsafe { aya_ebpf::helpers::generated::bpf_skc_to_tcp_sock(a) } }",
            "fn f(a: A) { a.read_kernel() }",
            "mod vmlinux;",
            "include!(\"bindings.rs\");",
            "use aya_ebpf::programs::ProbeContext;",
            "use aya_ebpf::programs::{FEntryContext as Context};",
            "use aya_ebpf::programs;",
            "use aya_ebpf::*;",
            "#[aya_ebpf::macros::kprobe]\nfn f() {}",
            "use aya_ebpf::bindings::pt_regs;",
            "use aya_ebpf::bindings::*;",
            "struct sock_common { a: u32 }",
            "fn f() { let at = offset_of!(sock, sk_state); }",
            "fn f(a: u64) { let b = a as *const u8; }",
            "fn f(tuple: *const u8) { let b = tuple.add(16); }",
            "fn f(a: *const u8) { let b = a.cast::<u8>().byte_offset(16); }",
        ] {
            assert_eq!(found_in(text).len(), 1, "{text}: {:?}", found_in(text));
        }
    }

    #[test]
    fn a_crate_more_is_found() {
        let manifest = format!("{MANIFEST}aya-ebpf-bindings = \"0.2\"\n");
        assert_eq!(
            found(HEAD, HOOK, &manifest),
            [
                "ebpf-programs/programs/Cargo.toml: `aya-ebpf-bindings` is no crate that programs may use"
            ]
        );
    }

    #[test]
    fn a_program_that_leaves_a_word_out_on_top_is_found() {
        for (word, what) in [
            ("Hook: ", "its hook"),
            ("Floor: Linux ", "its kernel floor"),
            ("Licence: ", "its licence"),
            ("at most: ", "its maps and their sizes"),
            ("Missing ", "what it does when something is missing"),
        ] {
            let findings = found(&HEAD.replace(word, ""), HOOK, MANIFEST);
            assert_eq!(findings.len(), 1, "{word}: {findings:?}");
            assert!(findings[0].contains(what), "{findings:?}");
        }
    }

    #[test]
    fn a_map_without_its_size_or_with_another_one_is_found() {
        for head in [
            HEAD.replace("WORDS 16,384", "none"),
            HEAD.replace("16,384", "16,385"),
        ] {
            assert_eq!(
                found(&head, HOOK, MANIFEST),
                [
                    "ebpf-programs/programs/src/count.rs:1: a program does not say how large WORDS is: 16384"
                ]
            );
        }
    }

    #[test]
    fn a_file_without_a_program_needs_no_such_lines() {
        assert_eq!(
            found("//! Helps.\n", "use crate::tables::WORDS;\n", MANIFEST),
            Vec::<String>::new()
        );
    }
}
