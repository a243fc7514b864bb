"""JSON schemas of growing nastiness: some listed, the rest drawn with a fixed seed. And those that must be refused."""

import random
from typing import Any

Schema = dict[str, Any]


def an_object(properties: dict[str, Any], *, required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def a_list(items: Any, low: int = 1, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def within(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


TEXT: Schema = {"type": "string", "maxLength": 12}
TREE: Schema = {
    "$defs": {
        "node": an_object(
            {"value": within(0, 9), "next": {"$ref": "#/$defs/link"}},
        ),
        "link": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    },
    "$ref": "#/$defs/node",
}

LISTED: list[Schema] = [
    # plain types
    TEXT, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": "object"},
    {"type": "array", "maxItems": 2}, {}, {"type": ["string", "null"], "maxLength": 5},
    {"type": ["integer", "boolean"]},
    # strings
    {"type": "string", "minLength": 3, "maxLength": 3}, {"type": "string", "minLength": 0, "maxLength": 0},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, {"type": "string", "pattern": "b+", "maxLength": 9},
    {"type": "string", "pattern": "^(red|green|blue)( (light|dark))?$"}, {"type": "string", "pattern": "^\\S+@\\w+$"},
    {"type": "string", "pattern": "^\\d{3}-\\d{4}$"}, {"type": "string", "pattern": '^"[^"]{1,5}"$'},
    {"type": "string", "pattern": "^\\\\{1,2}$"}, {"type": "string", "pattern": "^[а-я]{2,5}$"},
    {"type": "string", "pattern": "^[一-鿿]{2,4}$"}, {"type": "string", "pattern": "^(😀|🎉){1,3}$"},
    {"type": "string", "pattern": "^a.c$"}, {"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 6},
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    )),
    # enums and constants
    {"enum": ["a", "ab", "abc", "b"]}, {"enum": [1, 10, 100, -1, 1.5]}, {"enum": [None, True, False]},
    {"enum": ["quote\"", "back\\slash", "tab\t", "line\n", "slash/"]}, {"enum": ["é", "日本", "😀", "e\u0301", "‏ש"]},
    {"enum": [{"a": [1, {"b": None}]}, [[]], {}, "", 0]}, {"const": "only"}, {"const": {"k": [1, 2, {"x": "y"}]}},
    {"const": -0.5}, {"type": "string", "enum": ["x", "y"]}, {"enum": [f"item {n}" for n in range(200)]},
    # numbers
    within(5, 12), within(-3, 3),
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, {"type": "integer", "minimum": 1000},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70}, {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, {"type": "number", "minimum": -1.5, "maximum": -0.25},
    {"type": "number", "multipleOf": 0.25}, within(-(2**53), 2**53),
    {"type": "integer", "maximum": -100}, {"type": "number", "minimum": 99.5, "maximum": 100.5},
    {"type": "integer", "minimum": 0.5, "maximum": 2.5},
    # lists
    a_list(within(0, 9), 3, 3), a_list(TEXT, 0, 2),
    a_list(a_list({"type": "boolean"})),
    {"type": "array", "prefixItems": [{"type": "integer"}, TEXT, {"type": "boolean"}], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 4},
    a_list(an_object({"x": TEXT})),
    {"type": "array", "items": False},
    {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 3},
    # objects
    an_object({"name": TEXT, "age": within(0, 150)}),
    an_object({"a": TEXT, "b": {"type": "null"}}, required=["a"]), an_object({}),
    an_object({"": {"type": "integer"}, "a b": TEXT, 'q"': {"type": "null"}, "back\\": {"type": "boolean"}}),
    an_object({"ключ": TEXT, "日本": {"type": "integer"}, "😀": {"type": "boolean"}, "e\u0301": {"type": "null"}}),
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
    {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": TEXT},
    {"type": "object", "patternProperties": {"^n_": {"type": "integer"}, "^s_": TEXT}, "additionalProperties": False},
    {"type": "object", "required": ["x"]},
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "minProperties": 2},
    {"type": "object", "maxProperties": 0},
    an_object({"inner": an_object({"deep": an_object({"leaf": {"const": 7}})})}),
    an_object({f"field_{n}": within(0, 9) for n in range(12)}),
    an_object({"opt_1": TEXT, "opt_2": TEXT, "opt_3": {"type": "boolean"}}, required=[]),
    an_object({"when": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}}),
    # combinations
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    {"oneOf": [
        an_object({"kind": {"const": "cat"}, "lives": within(1, 9)}),
        an_object({"kind": {"const": "dog"}, "tricks": a_list(TEXT)}),
        an_object({"kind": {"enum": ["fish", "bird"]}, "tank": {"type": "boolean"}}),
    ]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}, {"multipleOf": 2}]},
    {"allOf": [
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
        {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
    ]},
    {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False, "anyOf": [
        {"properties": {"b": {"const": 1}}, "required": ["b"]}, {"properties": {"c": {"const": 2}}, "required": ["c"]},
    ]} | {"properties": {"a": TEXT, "b": {"type": "integer"}, "c": {"type": "integer"}}},
    {"anyOf": [{"const": "a"}, {"anyOf": [{"const": 1}, {"anyOf": [{"const": None}, {"const": [1]}]}]}]},
    {"anyOf": [an_object({"a": {"const": 1}}), an_object({"a": {"const": 1}, "b": {"const": 2}}),
               a_list({"const": 0})]},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^long[a-z]{5}$"}]},
    # references and recursion
    TREE, {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "maxLength": 4}}},
    {"$ref": "#/$defs/x", "maxLength": 2, "$defs": {"x": {"type": "string"}}},
    {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "boolean"}}},
    {"definitions": {"p": an_object({"x": {"type": "integer"}})},
     "type": "array", "items": {"$ref": "#/definitions/p"}, "maxItems": 2},
    {"$defs": {"a/b~c": {"const": "escaped"}}, "$ref": "#/$defs/a~1b~0c"},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"anyOf": [within(0, 9), an_object({
        "op": {"enum": ["+", "-", "*"]}, "left": {"$ref": "#"}, "right": {"$ref": "#"},
    })]},
    {"$defs": {
        "even": an_object({"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}}),
        "odd": an_object({"even": {"anyOf": [{"$ref": "#/$defs/even"}, {"type": "null"}]}}),
    }, "$ref": "#/$defs/even"},
    {"$defs": {"json": {"anyOf": [
        {"type": "null"}, {"type": "boolean"}, {"type": "integer"}, TEXT,
        {"type": "array", "items": {"$ref": "#/$defs/json"}, "maxItems": 2},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}, "maxProperties": 2},
    ]}}, "$ref": "#/$defs/json"},
    # what schema generators write
    an_object({
        "title": {"title": "Title", "description": "a title", "type": "string", "maxLength": 15, "default": "x"},
        "tags": {"anyOf": [a_list(TEXT, 0, 2), {"type": "null"}], "default": None, "title": "Tags"},
        "status": {"$ref": "#/$defs/Status"}, "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 99.99},
    }, **{"$defs": {"Status": {"enum": ["new", "used"], "title": "Status", "type": "string"}}, "title": "Item"}),
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
     "items": [{"const": 1}, {"const": 2}], "additionalItems": False},
    {"$schema": "http://json-schema.org/draft-04/schema#",
     "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 5},
    an_object({
        "nested": a_list(an_object({"k": TEXT, "v": {"anyOf": [{"type": "integer"}, TEXT]}}), 1, 2),
        "n": {"type": "integer"},
    }),
]  # fmt: skip

REFUSED: dict[str, Schema] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "then": {"then": {"type": "string"}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "maxContains": {"type": "array", "maxContains": 1},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "disallow": {"disallow": "string"},
    "divisibleBy": {"type": "integer", "divisibleBy": 2},
    "extends": {"extends": {"type": "string"}},
    "x-guidance": {"x-guidance": {"lenient": True}, "not": {}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "required": {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
    "minProperties": {"type": "object", "minProperties": 2},
    "minProperties 3": {"type": "object", "required": ["a"], "minProperties": 3},
    "min/maxProperties": {"type": "object", "properties": {"x": {}}, "minProperties": 1},
    "maximum": {"type": "integer", "maximum": 2**53 + 3},
    "enum": {"enum": ["bell\u0007"]},
    "control character in const": {"const": "a\x7fb"},
    "control character in enum": {"enum": [{"a": ["\x7f"]}]},
    "pattern 'a\\x7f'": {"type": "string", "pattern": "a\x7f"},
    "pattern '^a\\\\x7Fb$'": {"type": "string", "pattern": r"^a\x7Fb$"},
    "pattern '\\\\u007f'": {"type": "string", "pattern": r"\u007f"},
    "name of a property": {"properties": {"a\x7f": {}}},
    "2**53 in const": {"const": -(2**53) - 1},
    "2**53 in enum": {"enum": ["a", {"b": [2**60]}]},
    "$schema": {"$schema": "https://example.com/schema"},
    "http://example.com/a.json": {"$ref": "http://example.com/a.json"},
    "/nowhere": {"$ref": "#/nowhere"},
    "strin": {"type": "strin"},
    "phone": {"type": "string", "format": "phone"},
    "look-around": {"type": "string", "pattern": "^(?=a)b"},
    "backreferences": {"type": "string", "pattern": "(a)\\1"},
    "minimum (5) is greater than maximum (3)": within(5, 3),
    "anyOf is empty": {"enum": []},
}


def _draw(rng: random.Random, depth: int) -> Schema:
    kinds = ["string", "integer", "number", "enum", "pattern", "boolean", "format"]
    if depth > 0:
        kinds += ["object", "object", "array", "anyOf", "ref", "allOf"]
    kind = rng.choice(kinds)
    if kind == "string":
        low = rng.choice([0, 0, 2])
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 10)}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "number":
        low = rng.randint(-40, 40) / 8
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 80) / 8}
    if kind == "enum":
        values = ["a", "ü", "日本", "x y", 'q"', "\\", 1, -2.5, True, None, [1], {"k": "v"}, "😀", "long value here"]
        return {"enum": rng.sample(values, rng.randint(1, 5))}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-f0-9]{4}$", "^(ab|cd){1,3}$", "^[A-Z][a-zé]{1,6}$", "^v\\d+\\.\\d$"]),
        }
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid", "time"])}
    if kind == "array":
        return a_list(_draw(rng, depth - 1), rng.randint(0, 2), rng.randint(2, 3))
    if kind == "anyOf":
        return {"anyOf": [_draw(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "ref":
        return {"$ref": f"#/$defs/{rng.choice(['point', 'list', 'name'])}"}
    if kind == "allOf":
        return {"allOf": [{"type": "integer", "minimum": rng.randint(0, 9)}, {"maximum": rng.randint(9, 99)}]}
    names = rng.sample(["id", "name", "größe", "a b", "日付", "x", "type", "$ref_", "items"], rng.randint(1, 4))
    properties = {name: _draw(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return an_object(properties, required=required)


def drawn(count: int) -> list[Schema]:
    """Return `count` drawn schemas, the later the deeper."""
    rng = random.Random(20)
    definitions = {
        "point": an_object({"x": within(0, 9), "y": within(0, 9)}),
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{0,8}$"},
        "list": {
            "anyOf": [{"type": "null"}, an_object({"head": {"type": "boolean"}, "tail": {"$ref": "#/$defs/list"}})]
        },
    }
    return [_draw(rng, 1 + index * 4 // count) | {"$defs": definitions} for index in range(count)]


def all_schemas() -> list[Schema]:
    """Return 200 schemas."""
    return LISTED + drawn(200 - len(LISTED))
