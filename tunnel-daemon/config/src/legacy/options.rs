//! A macro that declares flags as a table: each row gives a field, its default and its flag.

/// Defines a struct of the options as typed, its `Default` with upstream's defaults, and `flags`, which binds each flag to its
/// field. A row is `field: Kind("name", "help") = default;`. Without a default it is the zero of its type; `Kind` is a `Slot`.
/// `with` adds another table.
macro_rules! options {
    (
        $Options:ident $(with $group:ident: $Group:ident.$group_flags:ident)? {
            $($field:ident: $kind:ident($name:literal, $help:expr $(, deprecated $why:literal)?) $(= $default:expr)?;)*
        }
        $(alias $alias:literal of $of:literal, deprecated $instead:literal;)*
    ) => {
        pub(super) struct $Options {
            $(pub(super) $field: $crate::legacy::options::options!(@type $kind),)*
            $(pub(super) $group: $Group,)?
        }

        impl Default for $Options {
            fn default() -> Self {
                Self {
                    $($field: $crate::legacy::options::options!(@default $($default)?),)*
                    $($group: $Group::default(),)?
                }
            }
        }

        impl $Options {
            pub(super) fn flags(&mut self) -> Vec<$crate::legacy::pflag::Flag<'_>> {
                use $crate::legacy::pflag::{Flag, Slot};
                #[allow(unused_mut, reason = "not every table has another in it")]
                let mut flags = vec![
                    $(Flag::new($name, Slot::$kind(&mut self.$field), $help)$(.deprecated($why))?,)*
                    $(Flag::new($alias, Slot::AliasOf($of), "").deprecated($instead),)*
                ];
                $(flags.extend(self.$group.$group_flags());)?
                flags
            }
        }
    };
    (@type Bool) => { bool };
    (@type Duration) => { $crate::legacy::gotype::GoDuration };
    (@type Float) => { f32 };
    (@type Int) => { i64 };
    (@type Uint) => { u64 };
    (@type Severity) => { i64 };
    (@type List) => { Vec<String> };
    (@type Repeated) => { Vec<String> };
    (@type $text:ident) => { String };
    (@default) => { Default::default() };
    (@default $default:expr) => { $default.into() };
}

pub(super) use options;
