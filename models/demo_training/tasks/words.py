"""The words that keys, lists, names and fields are made of: common, short, each one token."""

from __future__ import annotations

_ADJECTIVES = """
amber ancient bitter blue bold brave brief bright broad brown calm careful cheap clean clear clever
cold cool crisp curly damp dark deep dim dry dusty eager early easy empty faint fair fast fine firm
flat fond free fresh full gentle glad golden grand gray green happy hard heavy hidden high hollow
honest hot humble idle keen kind large late lazy light lively lonely long loose loud low lucky mellow
mild modest narrow neat new noble odd old open orange pale patient plain polite proud pure purple
quick quiet rapid rare red rich
"""
ADJECTIVES = tuple(_ADJECTIVES.split())

_NOUNS = """
acorn anchor apple arrow badge barn basket beach bell bird boat bottle bridge broom brush bucket
button cabin camel candle canyon castle cedar chain chair cherry cliff clock cloud coin comet copper
coral cottage cradle crown desert dragon drum eagle engine falcon feather fence field flame flute
forest fountain fox garden gate glove harbor hammer hawk helmet hill island jacket kettle ladder lake
lamp lantern leaf lemon lion maple marble market meadow mirror moon mountain needle ocean olive orchard
otter owl paddle palace pebble pepper pillow planet pond prairie
"""
NOUNS = tuple(_NOUNS.split())

_FIELDS = """
name title color size age count price weight height width speed city country street team player score
level rank status kind label code owner author year month day hour total limit batch worker slot role
tags items notes steps scores names colors open done active valid ready urgent public hidden paid
address profile box origin target leader engine place
"""
FIELDS = tuple(_FIELDS.split())

_NAMES = """
Ada Alan Alice Anna Ben Bob Carl Carol Clara Dan David Emma Eric Eva Frank Fred Grace Hans Ivan Jack Jane John
Kim Leo Lisa Luke Maria Mark Mary Max Mia Nina Noah Olga Oscar Paul Peter Rosa Sam Sara Tom Vera
"""
NAMES = tuple(_NAMES.split())

LETTERS = "abcdefghijklmnopqrstuvwxyz"
